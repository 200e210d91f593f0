"""Language models for masked-LM fine-tuning: by their name on Hugging Face's hub, or from a folder.

A folder is given as NAME=FOLDER and known by NAME#DIGEST, whatever machine it lies on; where it lies here is
noted beside the results.
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

from tam.lab.data import text
from tam.lab.store import LabError, digest_of_folder, locked, write_whole

NOTED = "models.json"


def transformers() -> Any:
    """The package, without its types, which change from version to version, and without its bars."""
    try:
        package = importlib.import_module("transformers")
    except ImportError as error:
        raise LabError("language models need a package: pip install 'torque-aware-momentum[llm]'") from error
    package.utils.logging.disable_progress_bar()
    package.utils.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every attempt to reach the hub
    return package


def note(given: str, root: Path) -> str:
    """The name of a model given as NAME=FOLDER, as a folder, or by a name on the hub; it can be loaded."""
    name, _, folder = given.partition("=") if "=" in given else (Path(given).resolve().name, "", given)
    path = Path(folder).resolve()
    if "=" not in given and not path.is_dir() and not given.startswith((".", "/")):
        load_tokenizer(given)
        return given
    if not path.is_dir() or not name or not folder:
        what = f"{folder or 'nothing'} is no folder" if name else "which name?"
        raise LabError(f"--model {given}: {what}")
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise LabError(f"the folder {path} has no weights (*.safetensors, *.bin)")
    _check_weights(path)
    load_tokenizer(str(path))
    known = f"{name}#{digest_of_folder(path)[:12]}"
    root.mkdir(parents=True, exist_ok=True)
    with locked(root):  # another run may note one, too
        noted = _noted(root) | {known: str(path)}
        write_whole(root / NOTED, json.dumps(noted, indent=1).encode() + b"\n")
    return known


def _check_weights(folder: Path) -> None:
    """Raises where a file of weights was cut short; its head says how long it is."""
    from safetensors import safe_open

    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, "pt"):
                pass
        except Exception as error:
            raise LabError(f"the weights {path} cannot be read: {error}") from error


def _noted(root: Path) -> dict[str, str]:
    try:
        return dict(json.loads((root / NOTED).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise LabError(f"{root / NOTED} is damaged: remove it, and give --model again") from error


def where(name: str | None, root: Path) -> str:
    """What transformers loads it by."""
    if name is None:
        raise LabError("which model? Give --model NAME=FOLDER, or a name on Hugging Face's hub")
    if name == "tiny-bert":
        return str(make_tiny(root / "tiny-bert"))
    if "#" not in name:
        return name
    path, given = _noted(root).get(name), f"--model {name.split('#')[0]}=FOLDER"
    if path is None or not Path(path).is_dir():
        raise LabError(f"the model {name} is not known here: give it with {given}")
    if _digest(path) != name.rpartition("#")[2]:
        raise LabError(f"{path} is no longer the model {name}: give it with {given}")
    return path


@cache
def _digest(path: str) -> str:
    return digest_of_folder(Path(path))[:12]


def load_tokenizer(where_it_is: str, masks: bool = True) -> Any:
    """The tokenizer; one that cannot mask is none, unless nothing is to be masked."""
    package = transformers()
    try:
        tokenizer = package.AutoTokenizer.from_pretrained(where_it_is)
        known = package.AutoConfig.from_pretrained(where_it_is).vocab_size
    except Exception as error:  # the hub's, the network's and the tokenizers' own
        told = " ".join(str(error).split())
        raise LabError(f"the model {where_it_is} or its tokenizer cannot be loaded: {told}") from error
    if masks and (tokenizer.mask_token is None or not tokenizer.is_fast):
        raise LabError(f"the tokenizer of {where_it_is} has no mask token, or is a slow one")
    if not known / 2 < len(tokenizer) <= known:  # without its files transformers makes an empty one
        raise LabError(
            f"the model {where_it_is} has no tokenizer of its own: the one found there knows "
            f"{len(tokenizer)} tokens, and the network {known}"
        )
    return tokenizer


def positions(config: Any) -> int:
    """How many tokens a network can tell apart by their place; RoBERTa's kind leaves out the first ones."""
    offset = (
        config.pad_token_id + 1 if "roberta" in config.model_type or config.model_type == "camembert" else 0
    )
    return int(config.max_position_embeddings) - offset


def check_block(where_it_is: str, block: int) -> None:
    """Raises where the network is not there, or has not as many positions as a block has tokens."""
    load_tokenizer(where_it_is)
    found = positions(transformers().AutoConfig.from_pretrained(where_it_is))
    if block > found:
        raise LabError(f"the model {where_it_is} has {found} positions: a block of {block} is too long")


def load_model(where_it_is: str, seed: int) -> tuple[Any, list[str]]:
    """The network with its masked-LM head, and the weights it did not have: tied, or drawn from the seed."""
    package = transformers()
    torch.manual_seed(seed)
    try:
        made, told = package.AutoModelForMaskedLM.from_pretrained(
            where_it_is, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:
        raise LabError(f"the model {where_it_is} cannot be loaded: {error}") from error
    new = sorted(told["missing_keys"])
    check_missing(where_it_is, [key for key in new if key.startswith(f"{made.base_model_prefix}.")])
    return made, new  # the head may be new


def check_missing(where_it_is: str, weights: list[str]) -> None:
    """Raises where there are some."""
    if weights:
        first = min(weights)
        raise LabError(f"the model {where_it_is} has no weights for {first} ({len(weights)} are missing)")


def make_tiny(folder: Path) -> Path:
    """A random BERT of two layers and its tokenizer, for the generated text."""
    if folder.exists():
        return folder
    package = transformers()
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [
        c for letter in "abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'-" for c in (letter, f"##{letter}")
    ]
    words = text.words_of(list(text.read("generated", folder).values()))
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*special, *words, *letters]))}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = package.BertTokenizerFast(tokenizer_object=made, model_max_length=64)
    config = package.BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = package.BertForMaskedLM(config)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    tokenizer.save_pretrained(part)
    model.save_pretrained(part)
    try:
        part.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(part)
    return folder
