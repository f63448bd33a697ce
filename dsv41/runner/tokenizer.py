"""Text to token ids and back, and the compressed ids that Engram hashes.

The only file that names `transformers` and `tokenizers`, both imported when first used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv41.config import ModelConfig

TOKENIZER_FILE = "tokenizer.json"
REPLACEMENT = "\ufffd"  # in the text of a token that is part of a UTF-8 sequence
LONE_SPACE = "\ue000"  # stands for " " while Strip runs


class Tokenizer:
    """The tokenizer of a model directory. Text is encoded as it is: no chat template is applied."""

    def __init__(self, fast: Any) -> None:
        self._fast = fast  # transformers.PreTrainedTokenizerFast

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer | None:
        """The tokenizer in `directory`, or None where there is no tokenizer.json."""
        if not (Path(directory) / TOKENIZER_FILE).is_file():
            return None
        from transformers import PreTrainedTokenizerFast

        return cls(PreTrainedTokenizerFast.from_pretrained(directory))

    @property
    def bos(self) -> int | None:
        """Id of the token that begins a sequence, if the tokenizer names one."""
        return self._fast.bos_token_id

    @property
    def eos(self) -> int | None:
        """Id of the token that ends a sequence, if the tokenizer names one."""
        return self._fast.eos_token_id

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens spelled out in it are recognised, so a BOS is not doubled."""
        ids: list[int] = self._fast.encode(text, add_special_tokens=False)
        if add_bos and self.bos is not None and ids[:1] != [self.bos]:
            ids.insert(0, self.bos)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included and spaces as they are."""
        return self._fast.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def engram_token_map(self, config: ModelConfig) -> Tensor:
        """Compressed id of every token, int64 [V] (spec/model.md, 6.1). Half a second for 129,280 ids.

        Tokens whose texts differ only in case, accents, width or kind of white space share an id. They count
        up in the order of first appearance.

        Raises ValueError when the number of distinct ids is not what the config says. All multipliers follow
        from that number, so another tokenizer revision would read unrelated rows.
        """
        backend = self._fast.backend_tokenizer
        normalise = _normaliser()
        tokens = [[token] for token in range(config.vocab_size)]
        texts = backend.decode_batch(tokens, skip_special_tokens=False)
        compressed: dict[str, int] = {}
        ids = []
        for token, text in enumerate(texts):
            key = backend.id_to_token(token) if REPLACEMENT in text else normalise(text) or text
            ids.append(compressed.setdefault(key, len(compressed)))
        expected = config.engram.compressed_vocab
        if len(compressed) != expected:
            raise ValueError(
                f"the tokenizer's {config.vocab_size} tokens compress to {len(compressed)} ids, but "
                f"engram_compressed_vocab_size is {expected}: the model was trained with another tokenizer"
            )
        return torch.tensor(ids, dtype=torch.int64)


def _normaliser() -> Callable[[str], str]:
    """The release's normal form of a text. A lone space survives as one; other text is stripped.

    The library's own steps, because Python's unicodedata and str methods differ from them for 819 characters.
    """
    from tokenizers import Regex, normalizers

    steps = [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"\A \z"), LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(LONE_SPACE, " "),
    ]
    return normalizers.Sequence(steps).normalize_str
