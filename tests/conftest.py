"""Two threads for every test: the suite is timed on two cores, and more threads only contend."""

import torch

torch.set_num_threads(2)
