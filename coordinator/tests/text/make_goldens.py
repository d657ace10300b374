"""Trains the small tokenizers of this suite and writes its golden files with transformers.

    python -m venv venv && venv/bin/pip install transformers==5.24.0 jinja2==3.1.6
    venv/bin/python make_corpus.py && venv/bin/python make_goldens.py [--train] [--smol CHECKPOINT]

Without --train the committed tokenizers are used as they are. --smol writes the ids for the demo model's tokenizer,
which is too large to commit; CHECKPOINT is the directory that holds its tokenizer.json.
"""

import argparse
import datetime
import json
import random
from pathlib import Path

import transformers.utils.chat_template_utils as chat_template_utils
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

HERE = Path(__file__).parent
CORPUS = json.loads((HERE / "corpus.json").read_text())
# Markers stay out of the training texts, so that vocabularies do not learn them.
TRAINING = [line for line in CORPUS if not any(mark in line for mark in ["<", "|||", "[gMASK]", "nothink"])]
CASES = json.loads((HERE / "cases.json").read_text())
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class FixedTime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2025, 3, 7, 9, 5, 3)


chat_template_utils.datetime = FixedTime


# ---------------------------------------------------------------------------------------------------- tokenizers


def special(text, **flags):
    return AddedToken(text, special=True, normalized=False, **flags)


def plain(text, normalized=False, **flags):
    return AddedToken(text, special=False, normalized=normalized, **flags)


def bytelevel():
    """Qwen and GLM: NFC, a splitting expression, bytes as characters; special and other added tokens behind them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=1600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(TRAINING, trainer)
    names = "<|endoftext|> <|im_start|> <|im_end|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>".split()
    tokenizer.add_special_tokens([special(name) for name in names] + [special("<mask>", lstrip=True, rstrip=True)])
    names = "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value> sčp"
    tokenizer.add_tokens([plain(name) for name in names.split()] + [plain("/nothink", single_word=True)])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return tokenizer, config


def sentencepiece(pieces):
    """What the SentencePiece tokenizers share: a BPE over whole texts with byte fallback."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    pieces(tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)],
        limit_alphabet=160, show_progress=False, max_token_length=12,
    )
    tokenizer.train_from_iterator([line[:60] for line in TRAINING], trainer)
    content = json.loads(tokenizer.to_str())
    # Byte tokens are ordinary entries of the vocabulary.
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < 3]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return tokenizer, config


def mixtral():
    """Mixtral and Llama 2: the blank is prepended by the normalizer, the decoder strips one."""

    def pieces(tokenizer):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )

    tokenizer, config = sentencepiece(pieces)
    return tokenizer, config | {"add_bos_token": True, "add_eos_token": False, "legacy": False}


def metaspace():
    """Newer conversions: the blank is prepended by the pre-tokenizer, at the start of the text only."""

    def pieces(tokenizer):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(replacement="▁", prepend_scheme="first")])

    return sentencepiece(pieces)


def unigram():
    """Unigram: control markers have entries in the model's own vocabulary."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=900, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_eos_token": True}
    return tokenizer, config


def neox():
    """GPT-NeoX and OLMoE: runs of blanks are added tokens, as are placeholders."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1300, special_tokens=["<|endoftext|>", "<|padding|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    tokenizer.add_tokens([plain(" " * blanks, normalized=True) for blanks in range(24, 1, -1)])
    tokenizer.add_tokens([plain("|||IP_ADDRESS|||", normalized=True), plain("|||EMAIL_ADDRESS|||", normalized=True)])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|padding|>", "add_prefix_space": False}
    return tokenizer, config


TOKENIZERS = {"bytelevel": bytelevel, "mixtral": mixtral, "metaspace": metaspace, "unigram": unigram, "neox": neox}


def train():
    for name, build in TOKENIZERS.items():
        tokenizer, config = build()
        directory = HERE / "tokenizers" / name
        directory.mkdir(parents=True, exist_ok=True)
        content = json.loads(tokenizer.to_str())
        write(directory / "tokenizer.json", json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")
        write(directory / "tokenizer_config.json", json.dumps(config, indent=1) + "\n")


# ------------------------------------------------------------------------------------------------------- goldens


def is_control(token):
    return token.special or bool(token.content.strip())


def without_control(directory):
    """The tokenizer with its control markers taken out; what is left keeps its ids."""
    content = json.loads((directory / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"] and not token["content"].strip()]
    content["post_processor"] = None
    return Tokenizer.from_str(json.dumps(content))


def ids_of(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    control = [token.content for token in tokenizer.added_tokens_decoder.values() if is_control(token)]
    text_only = without_control(directory)
    ids = [tokenizer(line)["input_ids"] for line in CORPUS]
    bare = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in CORPUS]
    golden = {"ids": ids}
    if bare != ids:
        golden["bare"] = bare
    golden["as_text"], golden["decoded"], golden["decoded_skipping"] = {}, {}, {}
    for index, line in enumerate(CORPUS):
        if any(name in line for name in control):
            as_text = text_only.encode(line).ids
            # A vocabulary that holds a marker spells it by itself; what is right there is tested apart.
            spelled = {text_only.id_to_token(index) for index in as_text} & {name for name in control if name in line}
            golden["as_text"][index] = None if spelled else as_text
        if "sčp" in line:
            continue
        for key, skip in [("decoded", False), ("decoded_skipping", True)]:
            golden[key][index] = tokenizer.decode(ids[index], skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            if golden[key][index] == line:
                del golden[key][index]
    golden["random"] = random_decodes(tokenizer)
    return golden


def random_decodes(tokenizer):
    """Decoded random ids, some beyond the vocabulary. Byte-fallback tokens stay out: transformers writes one U+FFFD for
    each byte of an invalid run, a UTF-8 decoder one for each maximal part of a character."""
    rng = random.Random(1)
    tokens = [tokenizer.convert_ids_to_tokens(index) or "" for index in range(len(tokenizer))]
    usable = [index for index, token in enumerate(tokens) if not token.startswith("<0x") and token != "sčp"]
    usable += [len(tokenizer) + 5, len(tokenizer) + 300]
    found = []
    for _ in range(60):
        ids = [rng.choice(usable) for _ in range(rng.randint(1, 24))]
        texts = [tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False) for skip in (False, True)]
        found.append({"ids": ids, "decoded": texts[0], "decoded_skipping": texts[1]})
    return found


def strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


CHATS = [
    ("bytelevel", "glm-4.6"), ("bytelevel", "glm-4.7-flash"), ("bytelevel", "qwen3"), ("bytelevel", "smollm2"), ("bytelevel", "smollm3"),
    ("mixtral", "mixtral-instruct"), ("metaspace", "mixtral-instruct"), ("unigram", "mixtral-instruct"), ("neox", "olmoe-instruct"),
]


def chats(pairs):
    """Ids of whole chats whose messages hold no control markers."""
    golden = []
    for directory, file in pairs:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        name, template = directory.name, file.stem
        control = [token.content for token in tokenizer.added_tokens_decoder.values() if is_control(token)]
        source = file.read_text()
        for case in CASES:
            texts = list(strings(case["messages"])) + list(strings(case.get("tools", [])))
            if any(marker in text for marker in control for text in texts):
                continue
            try:
                ids = tokenizer.apply_chat_template(
                    case["messages"], tools=case.get("tools"), chat_template=source, tokenize=True, return_dict=False,
                    add_generation_prompt=case.get("add_generation_prompt", True), **case.get("variables", {}),
                )
            except Exception:
                continue
            golden.append({"tokenizer": name, "template": template, "case": case["name"], "ids": ids})
    return golden


def render(source, case):
    messages = [{key: value for key, value in message.items() if value is not None} for message in case["messages"]]
    messages = chat_template_utils._alias_reasoning_fields(messages)
    try:
        rendered, _ = chat_template_utils.render_jinja_template(
            [messages], tools=case.get("tools"), chat_template=source,
            add_generation_prompt=case.get("add_generation_prompt", True), **SPECIAL, **case.get("variables", {}),
        )
        return {"text": rendered[0]}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}


def write(path, text):
    path.write_text(text)
    print(f"{path.relative_to(HERE)}: {len(text.encode()):,} bytes")


def dump(name, golden):
    lists = isinstance(golden, list)
    entries = golden if lists else [f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in golden.items()]
    lines = [json.dumps(entry, separators=(",", ":")) for entry in golden] if lists else entries
    write(HERE / "goldens" / name, ("[\n" if lists else "{\n") + ",\n".join(lines) + ("\n]\n" if lists else "\n}\n"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--smol", type=Path)
    options = parser.parse_args()
    (HERE / "goldens").mkdir(exist_ok=True)
    if options.train:
        train()
    for directory in sorted((HERE / "tokenizers").iterdir()):
        dump(f"ids-{directory.name}.json", ids_of(directory))
    dump("chats.json", chats((HERE / "tokenizers" / name, HERE / "templates" / f"{template}.jinja") for name, template in CHATS))
    sources = sorted((HERE / "templates").glob("*.jinja"))
    dump("templates.json", {source.name: [render(source.read_text(), case) for case in CASES] for source in sources})
    if options.smol:
        dump("ids-smol.json", ids_of(options.smol))
        dump("chats-smol.json", chats([(options.smol, options.smol / "chat_template.jinja")]))
