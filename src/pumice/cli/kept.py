"""On-disk caches: tuned tiles and plans (`pumice tune`), and kernels compiled before a first scene (`pumice
warmup`)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from textwrap import shorten

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import nn

from pumice.data import street_scene
from pumice.engine import compile as compiled
from pumice.errors import FileError, OptionError
from pumice.label.checkpoint import load
from pumice.models import CenterPointBackbone, MinkUNet
from pumice.ops import SparseTensor
from pumice.runtime.compile import BACKGROUND
from pumice.schedule.tuned_plans import PlanKey, Plans, TunedPlan
from pumice.schedule.tuned_tiles import Key, Ledger, Tuned

STATEMENT = 64  # characters of a statement in the table


@dataclass(frozen=True)
class Kept:
    """The user's tuning cache. Methods return a message for the user, and raise FileError."""

    tiles: Ledger
    plans: Plans

    def tables(self) -> list[RenderableType]:
        """The tiles and the plans, if any, in one table per device."""
        tiles, plans = self.tiles.all(), self.plans.all()
        found = [_tiles(tiles, device) for device in sorted({key.device for key in tiles})]
        return [*found, *(_plans(plans, device) for device in sorted({key.device for key in plans}))]

    def clear(self) -> str:
        """Remove all tiles and plans."""
        removed = [
            f"{_count(number, name)} from {own.path}"
            for own, name in ((self.tiles, "tile"), (self.plans, "plan"))
            if (number := own.clear())
        ]
        return f"removed {' and '.join(removed)}" if removed else self.nothing()

    def export(self, file: Path) -> str:
        """Write all tiles and plans, if any, to a file."""
        tiles, plans = len(self.tiles.all()), len(self.plans.all())
        if not tiles and not plans:
            return self.nothing()
        text = self.tiles.export()
        if plans:
            # Versions without plans can still read the tiles.
            text = f'{text.rstrip()[:-1]}, "plans": {self.plans.export().rstrip()}}}\n'
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as problem:
            raise FileError(f"{file} cannot be written ({problem.strerror or problem})") from problem
        return f"wrote {_both(tiles, plans)} to {file}"

    def merge(self, file: Path) -> str:
        """Add new or newer records of an export, or of a file of tiles or of plans."""
        parts = dict(_documents(file))
        try:
            tiles = self.tiles.merge(parts["tiles"]) if "tiles" in parts else 0
            plans = self.plans.merge(parts["plans"]) if "plans" in parts else 0
        except FileError as problem:
            raise problem if str(file) in str(problem) else FileError(f"{file}: {problem}") from problem
        return f"added {_both(tiles, plans)} from {file}"

    def nothing(self) -> str:
        """Message for an empty cache."""
        plans = "`pumice tune CHECKPOINT SCANS` and pumice.tune(model, samples) make plans"
        makers = f"{plans}; f.tune(...) and `with pm.tuning():` make tiles on a GPU"
        return f"no tuned tiles in {self.tiles.path} and no tuned plans in {self.plans.path}: {makers}"


def _documents(file: Path) -> Iterator[tuple[str, Path | str]]:
    """("tiles" or "plans", document) for each part of an exported file. Unknown files are "tiles", which then raise."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        found = None
    plans = found.get("plans") if isinstance(found, dict) else None
    if isinstance(plans, list):
        yield "plans", file
        return
    if plans is not None:
        yield "plans", json.dumps(plans)
    yield "tiles", file


def _tiles(found: Mapping[Key, Tuned], device: str) -> Table:
    table = _table(f"tiles of {device}", "statement, dtypes, sizes from", "tile", ">ms", "tuned")
    own = [(key, tuned) for key, tuned in found.items() if key.device == device]
    for key, tuned in sorted(own, key=lambda item: (item[0].statement, item[0].dtypes, item[0].sizes)):
        statement, below, *cells = _cells(key, tuned)
        table.add_row(_indented(statement, below), *map(Text, cells))
    return table


def _plans(found: Mapping[PlanKey, TunedPlan], device: str) -> Table:
    """A table of the plans of a device: the network, and below it the dataflow of each group of layers."""
    table = _table(f"plans of {device}", "network, dtypes, mode, dataflows", ">ms before", ">ms", "tuned")
    own = [(key, plan) for key, plan in found.items() if key.device == device]
    for key, plan in sorted(own, key=lambda item: (item[1].about, item[0].mode)):
        flows = [f"{group}: {flow}" for group, flow in plan.flows.items()] or ["default"]
        about = plan.about + ("" if plan.finished else " (unfinished)")
        before, after = (f"{1e3 * spent['total']:.4f}" for spent in (plan.before, plan.after))
        row = _indented(about, f"{key.dtypes}, {key.mode}", *flows)
        table.add_row(row, *map(Text, (before, after, _date(plan))))
    return table


def _table(title: str, first: str, *names: str) -> Table:
    """An empty table. Columns named with a leading ">" are right-aligned. Cells must be Text: rich parses "[m,n]" as
    markup. The first column wraps in a narrow terminal."""
    table = Table(box=None, padding=(0, 1), title=Text(title), title_justify="left", title_style="bold")
    table.add_column(first, overflow="fold", min_width=28)
    for name in names:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", no_wrap=name != "tile")
    return table


def _indented(head: str, *below: str) -> Group:
    return Group(Text(head), *(Padding(Text(line), (0, 0, 0, 2)) for line in below))


def _cells(key: Key, tuned: Tuned) -> tuple[str, ...]:
    dtypes = " ".join(key.dtypes) + (f" ({key.precision})" if key.precision else "")
    sizes = " ".join(str(round(2 ** (size / 2))) for size in key.sizes)
    best = "" if tuned.seconds is None else f"{1e3 * tuned.seconds:.4f}"
    statement = shorten(key.statement, STATEMENT, placeholder=" ...")
    return statement, f"{dtypes}, from {sizes}", str(tuned.tile), best, _date(tuned)


def _date(tuned: Tuned | TunedPlan) -> str:
    return tuned.date.astimezone().strftime("%Y-%m-%d")


def _both(tiles: int, plans: int) -> str:
    return _count(tiles, "tile") + (f" and {_count(plans, 'plan')}" if plans else "")


def _count(number: int, name: str) -> str:
    return f"{number} tuned {name}{'s' * (number != 1)}"


# Kernels
MODELS: Mapping[str, Callable[[], nn.Module]] = {"minkunet": MinkUNet, "centerpoint": CenterPointBackbone}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
VOXELS = (0.6, 0.3, 0.15, 0.08)
"""Voxel edges in metres, for about 3,000 to 60,000 voxels of a generated street."""
_REPORT = 0.2  # Seconds between reports


def network(name: str) -> nn.Module:
    """Load a network: a `pumice segment` checkpoint file, one of MODELS, or the result of calling MODULE:FUNCTION.

    Raises OptionError for any other name, or if the function does not return a torch.nn.Module.
    """
    if name in MODELS:
        return MODELS[name]()
    if Path(name).is_file():
        return load(Path(name), torch.device("cpu"))[0]
    module, _, function = name.partition(":")
    if not function:
        raise OptionError(f"{name!r} is no file, and no model; there are {', '.join(MODELS)}, and MODULE:FUNCTION")
    try:
        net = getattr(import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise OptionError(f"{name!r} cannot be imported: {error}") from None
    if not isinstance(net, nn.Module):
        raise OptionError(f"{name!r} should return a torch.nn.Module, found {type(net).__name__}")
    return net


def channels_of(net: nn.Module) -> int:
    """Input channels of the first layer with a weight. Raises OptionError if there is none."""
    for module in net.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim > 1:
            return weight.shape[-1]
    raise OptionError(f"{type(net).__name__} has no layer with a weight: give --channels")


def warm(
    net: nn.Module, channels: int, device: torch.device, precision: str, watch: Callable[[int], None]
) -> tuple[int, float]:
    """Run a network in eval mode on synthetic streets of several sizes, and wait until all its kernels are compiled.

    watch: called with the number of pending tasks. Returns (voxels of the largest street, seconds).
    """
    OptionError.check("precision", precision, DTYPES)
    begin, most = time.perf_counter(), 0
    program = compiled(net.to(device, DTYPES[precision]).eval())
    xyz = torch.from_numpy(street_scene(0).xyz)
    with torch.no_grad():
        for edge in VOXELS:
            cells = torch.unique((xyz / edge).floor().int(), dim=0)
            coords = nn.functional.pad(cells, (1, 0)).to(device)
            feats = torch.randn(len(coords), channels, device=device, dtype=DTYPES[precision])
            program(SparseTensor(feats, coords))
            most = max(most, len(coords))
    while BACKGROUND.left:
        watch(BACKGROUND.left)
        time.sleep(_REPORT)
    return most, time.perf_counter() - begin
