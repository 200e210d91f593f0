"""Language models for masked-LM fine-tuning: by their name on Hugging Face's hub, or from a folder.

A user gives a folder as NAME=FOLDER. Trials know it as NAME#DIGEST on any machine. `models.json` in the
output folder says where it is on this one.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tam.lab.core.errors import LabError, missing_package
from tam.lab.core.store import digest_of_folder, lock_folder, read_json, write_whole
from tam.lab.data import text

MODELS_FILE = "models.json"
TINY = "tiny-bert"
_digest = cache(digest_of_folder)


def transformers() -> Any:
    """Return the package, untyped since its types change between versions, without its progress bars."""
    try:
        package = importlib.import_module("transformers")
    except ImportError as error:
        raise missing_package("a language model", "transformers") from error
    package.utils.logging.disable_progress_bar()
    package.utils.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it reports every attempt to reach the hub
    return package


def register_model(source: str, root: Path) -> str:
    """Return the name that trials know a model by, which is NAME=FOLDER, a folder, or a name on the hub."""
    name, _, folder = source.partition("=") if "=" in source else (Path(source).resolve().name, "", source)
    path = Path(folder).resolve()
    if "=" not in source and not path.is_dir() and not source.startswith((".", "/")):
        load_tokenizer(source)
        return source
    if not name or not folder or not path.is_dir():
        raise LabError(f"--model {source}: must be NAME=FOLDER with a folder that exists")
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise LabError(f"the folder {path} has no weights (*.safetensors, *.bin)")
    from safetensors import safe_open

    for weights in path.glob("*.safetensors"):
        try:
            safe_open(weights, "pt")  # notices a file that is cut short: its head says how long it is
        except Exception as error:
            raise LabError(f"the weights {weights} cannot be read: {error}") from error
    load_tokenizer(str(path))
    known_as = f"{name}#{digest_of_folder(path)[:12]}"
    root.mkdir(parents=True, exist_ok=True)
    with lock_folder(root):  # another run may add a model, too
        models = _read_models(root) | {known_as: str(path)}
        write_whole(root / MODELS_FILE, json.dumps(models, indent=1).encode() + b"\n")
    return known_as


def _read_models(root: Path) -> dict[str, str]:
    try:
        return read_json(root / MODELS_FILE, dict, "Remove it, and give --model again")
    except FileNotFoundError:
        return {}


def locate_model(name: str | None, root: Path) -> str:
    """Return the folder or the hub's name that transformers loads a model from."""
    if name is None:
        raise LabError("this preset needs a model: --model NAME=FOLDER, or a name on Hugging Face's hub")
    if name == TINY:
        return str(make_tiny_bert(root / TINY))
    if "#" not in name:
        return name
    path, option = _read_models(root).get(name), f"--model {name.split('#')[0]}=FOLDER"
    if path is None or not Path(path).is_dir():
        raise LabError(f"the model {name} is not known here: give {option}")
    if _digest(Path(path))[:12] != name.rpartition("#")[2]:
        raise LabError(f"{path} is no longer the model {name}: give {option}")
    return path


def load_tokenizer(source: str, block: int = 0, needs_mask: bool = True) -> Any:
    """Return the tokenizer of a model, whose positions must suffice for a block of so many tokens."""
    package = transformers()
    try:
        tokenizer = package.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        config = package.AutoConfig.from_pretrained(source, trust_remote_code=False)
        vocabulary = config.vocab_size
    except Exception as error:  # the hub's, the network's and the tokenizers' own
        message = " ".join(str(error).split())
        raise LabError(f"the model {source} or its tokenizer cannot be loaded: {message}") from error
    if needs_mask and (tokenizer.mask_token is None or not tokenizer.is_fast):
        raise LabError(f"the tokenizer of {source} has no mask token, or is a slow one")
    if not vocabulary / 2 < len(tokenizer) <= vocabulary:  # without its files transformers makes an empty one
        sizes = f"{len(tokenizer)} tokens, the network {vocabulary}"
        raise LabError(f"the model {source} has no tokenizer of its own: the one there knows {sizes}")
    if block and block > (positions := position_count(config)):
        raise LabError(f"the model {source} has {positions} positions: a block of {block} is too long")
    return tokenizer


def position_count(config: Any) -> int:
    """Return how many positions a network has. RoBERTa and its relatives leave out the first ones."""
    is_roberta = "roberta" in config.model_type or config.model_type == "camembert"
    return int(config.max_position_embeddings) - (config.pad_token_id + 1 if is_roberta else 0)


def load_network(source: str, auto_class: str) -> tuple[Any, list[str]]:
    """Return a network in float32, by one of transformers' auto classes, and the weights it lacked.

    Raise LabError if it lacked others than those of a head or of the pooler, whose result is not used.
    """
    try:
        network, report = getattr(transformers(), auto_class).from_pretrained(
            source, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
    except Exception as error:  # of many kinds: no such folder, no connection, another format
        raise LabError(f"the model {source} cannot be loaded: {error}") from error
    new_weights = sorted(report["missing_keys"])
    prefix = "" if network.base_model is network else f"{network.base_model_prefix}."
    missing = [name for name in new_weights if name.startswith(prefix) and "pooler" not in name]
    if missing:
        count = f"{len(missing)} tensors are missing"
        raise LabError(f"the model {source} has no weights for {missing[0]} ({count})")
    return network, new_weights


def load_model(source: str, seed: int) -> tuple[Any, list[str]]:
    """Return a network with its masked-LM head, and the weights it lacked: tied, or drawn from the seed."""
    torch.manual_seed(seed)
    return load_network(source, "AutoModelForMaskedLM")


def make_tiny_bert(folder: Path) -> Path:
    """Write a random BERT of two layers and its tokenizer, for the generated text. Return the folder."""
    if folder.exists():
        return folder
    package = transformers()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [c for one in "abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'-" for c in (one, f"##{one}")]
    words = dict.fromkeys([*special, *text.words_of([*text.read("generated", folder).values()]), *letters])
    vocabulary = {word: i for i, word in enumerate(words)}
    config = package.BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = package.BertForMaskedLM(config)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    package.BertTokenizer(vocab=vocabulary, model_max_length=64).save_pretrained(part)
    model.save_pretrained(part)
    try:
        part.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(part)
    return folder
