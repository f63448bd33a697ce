"""One thread for every test: the tensors are small, and a second thread waits more than it works."""

import torch

torch.set_num_threads(1)
