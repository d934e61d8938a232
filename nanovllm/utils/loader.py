"""Loader: the safetensors files of a folder -> a model's parameters, all of them, exactly once."""

import glob
import json
import os
from collections.abc import Callable, Hashable
from contextlib import ExitStack

from safetensors import SafetensorError, safe_open
from torch import nn

# (source, shard_id) -> None, as described in layers/linear.py
WeightLoader = Callable[..., None]

STORED_DTYPES = ("F32", "BF16", "F16")


def load_weights(model: nn.Module, folder: str) -> None:
    """Fill every parameter of `model` from the *.safetensors in `folder`.

    The names are compared first, so nothing is read from an incomplete checkpoint. Each
    parameter's `weight_loader` then reads only its rank's slice from the mapped file.
    `model.packed_modules_mapping` names the stored tensors that make up a fused parameter, and
    `model.ignored_tensors` those that may be stored but are not used.

    Raises ValueError naming what is missing, unexpected, doubled, unreadable or misshapen.
    """
    destinations = expected_tensors(model)
    with ExitStack() as stack:
        sources = _open_tensors(folder, stack)
        missing = destinations.keys() - sources.keys()
        unexpected = sources.keys() - destinations.keys() - model.ignored_tensors
        if missing or unexpected:
            raise ValueError(
                f"{folder}: the checkpoint does not match config.json: "
                f"missing {_listed(missing)}; unexpected {_listed(unexpected)}"
            )
        for name, (load, shard_id) in destinations.items():
            path, file = sources[name]
            try:
                stored = file.get_slice(name)
                if stored.get_dtype() not in STORED_DTYPES:
                    raise ValueError(
                        f"dtype {stored.get_dtype()} is not one of {', '.join(STORED_DTYPES)}: "
                        "quantized checkpoints are not supported"
                    )
                load(stored, shard_id)
            except (ValueError, RuntimeError, SafetensorError) as error:
                raise ValueError(f"{path}: tensor {name!r}: {error}") from error


def expected_tensors(model: nn.Module) -> dict[str, tuple[WeightLoader, Hashable]]:
    """Stored name -> (the loader of its parameter, shard id or None). One entry fills one
    parameter or one shard of it, so that a matching set of names fills each exactly once."""
    expected: dict[str, tuple[WeightLoader, Hashable]] = {}
    for name, param in model.named_parameters():  # a tied weight is listed once
        *prefix, module, leaf = name.split(".")
        parts = model.packed_modules_mapping.get(module, {module: None})
        for part, shard_id in parts.items():
            expected[".".join((*prefix, part, leaf))] = (param.weight_loader, shard_id)
    return expected


def _open_tensors(folder: str, stack: ExitStack) -> dict[str, tuple[str, safe_open]]:
    """Tensor name -> (path, open file). With an index the index decides; strays are ignored."""
    index_path = os.path.join(folder, "model.safetensors.index.json")
    weight_map: dict[str, str] | None = None
    if os.path.isfile(index_path):
        try:
            with open(index_path, encoding="utf-8") as file:
                weight_map = json.load(file)["weight_map"]
            paths = sorted({os.path.join(folder, name) for name in weight_map.values()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"{index_path} cannot be read: {error!r}") from error
    else:
        paths = sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors")))
    if not paths:
        raise ValueError(f"{folder}: no *.safetensors files, so there are no weights to load")
    sources: dict[str, tuple[str, safe_open]] = {}
    for path in paths:
        try:
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{path} cannot be read: {error}; is the download complete?"
            ) from error
        for name in file.keys():  # noqa: SIM118 (a safe_open is not iterable)
            if weight_map is not None and weight_map.get(name) != os.path.basename(path):
                continue
            if name in sources:
                raise ValueError(f"tensor {name!r} is in both {sources[name][0]} and {path}")
            sources[name] = (path, file)
    return sources


def _listed(names: set[str], most: int = 8) -> str:
    shown = ", ".join(sorted(names)[:most]) or "none"
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
