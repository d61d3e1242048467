"""Write the small tokenizers of this folder: `python tests/data/tokenizers/make.py`.

Each folder holds the text files of an engine folder. The vocabularies are our own and tiny; ids of control tokens are
those of the real families where a case names them (128000, 106, 32007 ...), so the vocabularies have holes.

    chatml          byte-level, no BOS; markers, reasoning tags and a switch for them as in Qwen 3
    llama3          byte-level, BOS 128000 from template and tokenizer, two end tokens
    gemma3          SentencePiece without a leading space, byte tokens, BOS 2, end tokens 1 and 106; strict roles
    sentencepiece   SentencePiece with a leading space (Llama 2, Phi-3), byte tokens, Phi-3's three end tokens
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
WORDS = ("Hello", "world", "the", "leading", "quick", "brown", "fox", "user", "assistant", "system", "think")


def main() -> None:
    """Write all folders."""
    write("chatml", byte_level(CHATML), CHATML_TEMPLATE, eos_ids=[2, 0], eos_token="<|im_end|>")
    write(
        "llama3",
        byte_level(LLAMA3, adds_bos=(128000, "<|begin_of_text|>")),
        LLAMA3_TEMPLATE,
        eos_ids=[128001, 128009],
        eos_token="<|eot_id|>",
        bos=(128000, "<|begin_of_text|>"),
        known_ids=128256,
    )
    write(
        "gemma3",
        sentencepiece(GEMMA3, prefix=False),
        GEMMA3_TEMPLATE,
        eos_ids=[1, 106],
        eos_token="<eos>",
        bos=(2, "<bos>"),
    )
    write(
        "sentencepiece",
        sentencepiece(PHI3, prefix=True),
        PHI3_TEMPLATE,
        eos_ids=[32000, 32001, 32007],
        eos_token="<|endoftext|>",
        bos=(1, "<s>"),
        known_ids=32011,
    )


CHATML = {
    "<|endoftext|>": (0, True),
    "<|im_start|>": (1, True),
    "<|im_end|>": (2, True),
    "<｜User｜>": (3, False),  # a turn marker that a checkpoint forgot to call special
    "<think>": (4, False),
    "</think>": (5, False),
}
LLAMA3 = {
    "<|begin_of_text|>": (128000, True),
    "<|end_of_text|>": (128001, True),
    "<|start_header_id|>": (128006, True),
    "<|end_header_id|>": (128007, True),
    "<|eot_id|>": (128009, True),
}
GEMMA3 = {
    "<pad>": (0, True),
    "<eos>": (1, True),
    "<bos>": (2, True),
    "<unk>": (3, True),
    "<start_of_turn>": (105, True),
    "<end_of_turn>": (106, True),
}
PHI3 = {
    "<unk>": (0, True),
    "<s>": (1, True),
    "</s>": (2, False),
    "<|endoftext|>": (32000, True),
    "<|assistant|>": (32001, True),
    "<|end|>": (32007, True),
    "<|user|>": (32010, True),
}

CHATML_TEMPLATE = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA3_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA3_TEMPLATE = """\
{{ bos_token }}
{%- set turns = messages %}
{%- set opening = '' %}
{%- if messages[0].role == 'system' %}
    {%- set opening = messages[0].content + '\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- endif %}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- (opening if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""
PHI3_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""


def write(
    folder: str,
    tokenizer: dict,
    template: str,
    *,
    eos_ids: list[int],
    eos_token: str,
    bos: tuple[int, str] | None = None,
    known_ids: int | None = None,
) -> None:
    """Write one folder's three files."""
    path = HERE / folder
    path.mkdir(exist_ok=True)
    settings = {
        "eos_ids": eos_ids,
        "bos_id": bos[0] if bos else None,
        "bos_token": bos[1] if bos else None,
        "eos_token": eos_token,
        "add_bos": bos is not None,
        "known_ids": known_ids or max(tokenizer["model"]["vocab"].values()) + 1,
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False) + "\n", encoding="utf-8")
    (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    (path / "generation.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def byte_level(control: dict, adds_bos: tuple[int, str] | None = None) -> dict:
    """Describe a byte-level BPE: 256 bytes, a few words, and the pairs of bytes that case C52 names."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    char = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    words = [w for word in WORDS for w in (word, char[0x20] + word)]
    pairs = [(0xE6, 0xAD), (0xF0, 0x9F), (0x8E, 0x89), (0x20, 0xF0), (0x0A, 0x0A)]
    vocab, merges = vocabulary(control, [char[byte] for byte in range(256)], words)
    for first, second in pairs:
        add_merge(vocab, merges, char[first], char[second])
    add_merge(vocab, merges, char[0x20] + char[0xF0], char[0x9F])
    processor = None
    if adds_bos:
        number, text = adds_bos
        begin = {"SpecialToken": {"id": text, "type_id": 0}}
        processor = {
            "type": "TemplateProcessing",
            "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {text: {"id": text, "ids": [number], "tokens": [text]}},
        }
    stage = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return describe(control, vocab, merges, pre_tokenizer=stage, decoder=stage, post_processor=processor)


def sentencepiece(control: dict, *, prefix: bool) -> dict:
    """Describe a SentencePiece-type BPE with byte tokens; `prefix` puts a space before the first word."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = [chr(code) for code in range(0x21, 0x7F)] + ["▁", "\n"]
    vocab, merges = vocabulary(control, byte_tokens + letters, ["▁" + word for word in (*WORDS, "x")])
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizer: dict = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]}
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return describe(
        control,
        vocab,
        merges,
        normalizer=normalizer if prefix else spaces,
        decoder={"type": "Sequence", "decoders": decoders},
        byte_fallback=True,
        unk_token="<unk>",
    )


def vocabulary(control: dict, atoms: list[str], words: list[str]) -> tuple[dict[str, int], list[list[str]]]:
    """Give ids to control tokens, atoms and words, the last with the merges that build them letter by letter."""
    vocab = {text: number for text, (number, _) in control.items()}
    merges: list[list[str]] = []
    for atom in atoms:
        vocab[atom] = free_id(vocab)
    for word in words:
        for end in range(1, len(word)):
            add_merge(vocab, merges, word[:end], word[end])
    return vocab, merges


def add_merge(vocab: dict[str, int], merges: list[list[str]], first: str, second: str) -> None:
    """Append a merge and its result."""
    if first + second not in vocab:
        vocab[first + second] = free_id(vocab)
        merges.append([first, second])


def free_id(vocab: dict[str, int]) -> int:
    """Return the lowest id not in use."""
    used = set(vocab.values())
    return next(number for number in range(len(used) + 1) if number not in used)


def describe(control: dict, vocab: dict, merges: list, **parts: object) -> dict:
    """Return the content of tokenizer.json."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": text, **flags, "special": special} for text, (number, special) in control.items()
        ],
        "normalizer": parts.get("normalizer"),
        "pre_tokenizer": parts.get("pre_tokenizer"),
        "post_processor": parts.get("post_processor"),
        "decoder": parts["decoder"],
        "model": {
            "type": "BPE",
            "unk_token": parts.get("unk_token"),
            "byte_fallback": parts.get("byte_fallback", False),
            "vocab": dict(sorted(vocab.items(), key=lambda item: item[1])),
            "merges": merges,
        },
    }


if __name__ == "__main__":
    main()
