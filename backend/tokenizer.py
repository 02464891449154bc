"""Text to tokens and back, from a tokenizer.json or from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Engine

from backend.config_json import read_json
from backend.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types

# How text is cut before merges, by llama.cpp's name. GPT-2's pattern, digits one by one; and Llama 3's and Qwen's own.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    "llama-bpe": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST,
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST,
}


class Tokenizer:
    """`eos_token_ids` end an answer; `chat_template` is Jinja, or empty."""

    def __init__(self, engine: Engine, chat_template: str = "") -> None:
        self.engine = engine
        self.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        return self.engine.get_vocab_size()

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.engine.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens are left out; bytes that are no text become U+FFFD."""
        return self.engine.decode(list(token_ids), skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation whose next turn is the model's. Raises ValueError if there is no template."""
        if not self.chat_template:
            raise ValueError("this model has no chat template: give it plain text")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            template = environment.from_string(self.chat_template)
            return template.render(messages=list(messages), add_generation_prompt=True)
        except TemplateError as error:
            raise ValueError(f"the model's chat template cannot be filled in: {error}") from None

    def stream(self) -> TextStream:
        return TextStream(self)


class TextStream:
    """Text of an answer as its tokens come: never half a character, and together what `decode` says of them all."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._read_from = 0  # tokens before it matter no more
        self._num_shown = 0  # characters of the text from there on that are out

    def push(self, token_id: int) -> str:
        """What can be shown now that this token is known; empty while a character is incomplete."""
        self._token_ids.append(token_id)
        text = self._text()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        shown, self._num_shown = text[self._num_shown :], len(text)
        if len(self._token_ids) - self._read_from > 32:  # start afresh, with one token of context for its spaces
            self._read_from = len(self._token_ids) - 1
            self._num_shown = len(self._text())
        return shown

    def finish(self) -> str:
        """What is left when the answer is over, incomplete or not."""
        shown = self._text()[self._num_shown :]
        self._token_ids, self._read_from, self._num_shown = [], 0, 0
        return shown

    def _text(self) -> str:
        return self._tokenizer.decode(self._token_ids[self._read_from :])


def from_gguf(file: GgufFile) -> Tokenizer | None:
    """Byte-level BPE with a known way of cutting words; None for tokenizers of other kinds.

    Raises ValueError for one whose merges and tokens do not fit together.
    """
    settings, cut = file.settings, str(file.settings.get("tokenizer.ggml.pre", "default"))
    before = _pre_tokenizer(cut)
    if settings.get("tokenizer.ggml.model") != "gpt2" or before is None:
        return None
    tokens, is_llama_3 = _texts(file, "tokenizer.ggml.tokens"), cut == "llama-bpe"
    engine = _bpe(file, tokens, ignore_merges=is_llama_3)  # Llama 3 takes a word that is a token as it is
    engine.pre_tokenizer = before
    engine.decoder = decoders.ByteLevel()
    types = settings.get("tokenizer.ggml.token_type")
    kinds = list(zip(tokens, types if isinstance(types, list) else (), strict=False))
    engine.add_special_tokens([AddedToken(token, special=True) for token, kind in kinds if kind == _CONTROL])
    engine.add_tokens([AddedToken(token, special=False) for token, kind in kinds if kind == _USER_DEFINED])
    first = settings.get("tokenizer.ggml.bos_token_id")
    if settings.get("tokenizer.ggml.add_bos_token", is_llama_3) and type(first) is int and first < len(tokens):
        begin = tokens[first]
        engine.post_processor = processors.TemplateProcessing(f"{begin} $A", special_tokens=[(begin, first)])
    return Tokenizer(engine, str(settings.get("tokenizer.chat_template", "")))


def _bpe(file: GgufFile, tokens: Sequence[str], ignore_merges: bool) -> Engine:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [_pair(merge) for merge in _texts(file, "tokenizer.ggml.merges")]
    try:
        return Engine(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{file.path}: its tokenizer does not fit together ({str(error).splitlines()[0]})") from None


def _texts(file: GgufFile, name: str) -> list[str]:
    values = file.settings.get(name)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{file.path}: {name} must be a list of texts")
    return values


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(name: str) -> Any:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("gpt-2", "default"):
        return words
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if name not in _PATTERNS:
        return None
    split = pre_tokenizers.Split(Regex(_PATTERNS[name]), behavior="isolated")
    return pre_tokenizers.Sequence([split, bytes_only])


def from_folder(folder: Path) -> Tokenizer | None:
    """Of a Hugging Face folder; None if it has no tokenizer.json. Raises ValueError for one that cannot be read."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        engine = Engine.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path}: not a readable tokenizer ({str(error).splitlines()[0]})") from None
    return Tokenizer(engine, _folder_template(folder))


def _folder_template(folder: Path) -> str:
    """In a file of its own, or in the tokenizer's settings; empty if there is none."""
    own, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if own.is_file():
        return own.read_text(encoding="utf-8", errors="replace")
    template = read_json(settings).get("chat_template") if settings.is_file() else None
    return template if isinstance(template, str) else ""
