"""The tokenizer that a user names, as a function from text to ids."""

from functools import lru_cache
from pathlib import Path

from traces.errors import ParameterError
from traces.formats.rows import Encode


@lru_cache(maxsize=4)
def encoder(path: str) -> Encode:
    """Encode with `tokenizer.json` in a folder, or with that file, without special tokens; raises ParameterError."""
    from tokenizers import Tokenizer

    place = Path(path).expanduser()
    file = place / "tokenizer.json" if place.is_dir() else place
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for every fault of the file
        raise ParameterError(
            "tokenizer", f"cannot read {file}: {error}; name a folder with tokenizer.json"
        ) from error

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode
