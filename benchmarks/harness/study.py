"""Studies: our call and the peers' are checked against a float64 result, then timed in turn, as rows."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness.families import PEAK
from benchmarks.harness.memory import peak
from benchmarks.harness.results import geomean, grouped
from benchmarks.harness.rows import Peer, Row, device_name, row_of
from benchmarks.harness.timing import Times, clocks, together
from pumice.cli.segment import pick_device
from pumice.errors import OptionError, PumiceError
from pumice.language.bind import BoundStatement
from pumice.lower import plan
from pumice.lower.graph import PreparedGraph, prepare
from pumice.lower.inductor import compiled
from pumice.lower.kernel import DEFAULT, runner, tile_of, tuning, use_tuning_mode
from pumice.ops.einsum import compile_einsum
from pumice.ops.operands import flatten_used
from pumice.ops.sparse import Sparse
from pumice.schedule.predict import DEVICES

Say = Callable[[str], object]
DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
}
SLOW = 2.0  # seconds; slower first calls are reported
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4, torch.float64: 1e-10}
"""Relative errors of results above which a way is not timed; float32 leaves room for long sums."""


@dataclass(frozen=True)
class Options:
    """Options of the command line.

    case: one study. only: cases whose name contains this text. thorough: include peers and sizes that take minutes to
    tune. limit: seconds per study (suite stream: per way); 0: no limit. count: scans or geometries per study; 0: its
    default. scenes, most, inline: for the suite stream: a folder of scenes, maximum voxels they are cropped to, and
    whether all ways are measured in this process.
    """

    case: str = ""
    only: str = ""
    quick: bool = False
    device: str = "auto"
    thorough: bool = False
    limit: float = 0.0
    count: int = 0
    scenes: str = ""
    most: int = 0
    inline: bool = False

    def __post_init__(self) -> None:
        if self.count < 0:
            raise OptionError(f"the count of a study is 0 or more, found {self.count}")
        if not self.limit >= 0:
            raise OptionError(f"the seconds of a study are 0 or more, found {self.limit}")


@dataclass(frozen=True)
class Setup:
    """Where and how a study runs.

    quick: tiny sizes, few repeats. failures: messages of failed checks. absent: packages of missing peers. until: the
    end of the study by time.perf_counter. count: scans or geometries; 0: the study's default.
    """

    device: torch.device
    quick: bool
    say: Say
    only: str = ""
    thorough: bool = False
    suite: str = "einsum"
    failures: list[str] = field(default_factory=list)
    absent: set[str] = field(default_factory=set)
    until: float = math.inf
    count: int = 0

    @property
    def left(self) -> float:
        """Seconds left for the study."""
        return self.until - time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds for one clock of one case, over all calls."""
        return 0.01 if self.quick else 0.4

    @property
    def half(self) -> torch.dtype:
        """float16; float32 on a CPU."""
        return torch.float16 if self.device.type == "cuda" else torch.float32

    @property
    def clock(self) -> str:
        """The device's own clock if it has one, else the wall clock."""
        return clocks(self.device)[-1]

    def wants(self, name: str) -> bool:
        return self.only in name

    def failed(self, what: str) -> None:
        self.say(f"FAILED {what}")
        self.failures.append(what)

    def settle(self) -> None:
        """Raise PumiceError if a check or a study failed."""
        if self.failures:
            raise PumiceError(f"{len(self.failures)} failed: {'; '.join(self.failures)}")

    def row(
        self,
        case: str,
        times: Times | float,
        clock: str,
        peer: Peer,
        metric: str = "time",
        unit: str = "ms",
        dtype: str | torch.dtype = "",
    ) -> Row:
        """A row of this suite and device; default dtype: `half`. A number as `times` is a value without quantiles."""
        label = dtype if isinstance(dtype, str) else DTYPES[dtype]
        about = (self.suite, case, metric, unit, label or DTYPES[self.half])
        return row_of(about, times if isinstance(times, Times) else Times.exactly(times), clock, peer, self.device)

    def random(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
        """Normal random numbers from the CPU's generator, the same for every device."""
        chance = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=chance).to(self.device, dtype)

    def filled(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
        """Normal random numbers generated on the device, which is faster for large tensors."""
        chance = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=chance, device=self.device).to(dtype)


Study = Callable[[Setup], Iterator[Row]]


@dataclass(frozen=True)
class Suite:
    """Studies by name. every: without the option `case` all of them run, otherwise only the first."""

    name: str
    studies: Mapping[str, Study]
    every: bool = True

    def __call__(self, say: Say, options: Options) -> Iterator[Row]:
        """Yield the rows of the study named in the options, or of the default studies.

        With a time limit, a study skips measurements. If one of several studies raises, the others still run. Raises
        OptionError for an unknown case, and PumiceError at the end if a check or a study failed.
        """
        if options.case and options.case not in self.studies:
            raise OptionError(f"case {options.case!r} of {self.name} is unknown; there are {', '.join(self.studies)}")
        device = pick_device(options.device)
        setup = Setup(device, options.quick, say, options.only, options.thorough, self.name, count=options.count)
        say(f"{device_name(device)}, torch {torch.__version__}; milliseconds, median (20 %, 80 %; relative error)")
        names = [options.case] if options.case else list(self.studies)[: None if self.every else 1]
        for name in names:
            begin = time.perf_counter()
            try:
                yield from self.studies[name](replace(setup, until=begin + options.limit) if options.limit else setup)
            except Exception as reason:
                if len(names) == 1:
                    raise
                setup.failed(f"{name}: {one_line(reason)}")
            say(f"{name}: {time.perf_counter() - begin:.0f} s")
        setup.settle()


@dataclass(frozen=True)
class Way:
    """A way to compute a case's result. make() prepares the call; a peer's may raise ModuleNotFoundError.

    package: the peer's distribution. view: converts the call's result for the comparison. slack: factor on the
    tolerance. optional: a way of ours that may fail without failing the run.
    """

    name: str
    make: Callable[[], Callable[[], Any]]
    package: str = ""
    view: Callable[[Any], Any] = lambda x: x
    slack: float = 1.0
    optional: bool = False


@dataclass(frozen=True)
class Case:
    """A result that several ways compute. bounds: lower bounds of the time on an H200 in milliseconds, by name."""

    name: str
    dtype: torch.dtype
    truth: Tensor | Sequence[Tensor]
    bounds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Ready:
    """A checked way: its call and its relative error."""

    name: str
    call: Callable[[], Any]
    package: str
    error: float


def error(found: Any, truth: Tensor | Sequence[Tensor]) -> float:
    """|found - truth| / |truth| in float64, maximum over several tensors; inf if a shape differs, NaN if one is NaN."""
    if isinstance(truth, Tensor):
        found, truth = [found], [truth]
    worst = 0.0
    for mine, right in zip(found, truth, strict=True):
        if mine.shape != right.shape:
            return float("inf")
        distance = float((mine.detach().double() - right.double()).norm() / right.double().norm().clamp(min=1e-30))
        worst = distance if distance != distance or distance > worst else worst
        if worst != worst:
            return worst
    return worst


def ready(setup: Setup, case: Case, way: Way, ours: bool) -> Ready | None:
    """Make and check a way; None if that fails. A failure of ours fails the run; a peer's is reported in one line."""
    if way.package in setup.absent:
        return None
    begin = time.perf_counter()
    try:
        with quietly():
            call = way.make()
            distance = error(way.view(call()), case.truth)
    except ModuleNotFoundError as reason:
        setup.absent.add(way.package)
        told = f"{way.package or way.name} is left out: {one_line(reason)}"
        setup.failed(told) if ours else setup.say(told)
        return None
    except Exception as reason:  # peers may raise anything; the other cases still run
        recover(setup)
        told = f"{case.name}: {way.name}: {one_line(reason)}"
        setup.failed(told) if ours and not way.optional else setup.say(f"  {told}")
        return None
    bound = way.slack * TOLERANCE[case.dtype]
    if not distance < bound:
        told = f"{case.name}: {way.name}: relative error {distance:.2g}, expected below {bound:g}; not timed"
        setup.failed(told) if ours else setup.say(f"  {told}")
        return None
    if time.perf_counter() - begin > SLOW:
        setup.say(f"  {case.name}: {way.name}: made and first run in {time.perf_counter() - begin:.1f} s")
    return Ready(way.name, call, way.package, distance)


def measured(setup: Setup, case: Case, ours: Sequence[Way], peers: Sequence[Way]) -> Iterator[Row]:
    """Check our ways and the peers', time them in turn, and yield a row per way of ours, peer and clock."""
    _forget_compiled()
    mine = [r for r in (ready(setup, case, way, True) for way in ours) if r]
    if not mine:
        setup.failed(f"{case.name}: no way of ours is left")
        return
    theirs = [r for r in (ready(setup, case, way, False) for way in peers) if r]
    yield from timed(setup, case, mine, theirs)
    yield from memory_rows(setup, {f"{case.name}/{own.name}": own for own in mine}, theirs, DTYPES[case.dtype])


def memory_rows(setup: Setup, ours: Mapping[str, Ready], theirs: Sequence[Ready], dtype: str = "") -> Iterator[Row]:
    """On a GPU, the peak memory of each of our ways (by the case of its rows) beside each peer's; a way that runs out
    of memory, or that takes none (a captured graph has its own), has no row."""
    found: dict[str, float] = {}
    for name, way in (*ours.items(), *((way.name, way) for way in theirs)):
        try:
            size = peak(way.call, setup.device)
        except RuntimeError as reason:
            recover(setup)
            setup.say(f"  {name}: {PEAK}: {one_line(reason)}")
            continue
        if size:
            found[name] = size
    if found:
        setup.say(f"  {PEAK}: {', '.join(f'{name} {size:.4g} MB' for name, size in found.items())}")
    for case in (case for case in ours if case in found):
        for way in (way for way in theirs if way.name in found):
            peer = Peer(way.name, found[way.name], package=way.package)
            yield setup.row(case, found[case], "count", peer, PEAK, "MB", dtype)


def timed(setup: Setup, case: Case, mine: Sequence[Ready], theirs: Sequence[Ready]) -> Iterator[Row]:
    """Time checked ways in turn and yield their rows."""
    everyone = (*mine, *theirs)
    for clock in clocks(setup.device):
        try:
            spent = together([r.call for r in everyone], setup.device, clock, setup.seconds)
        except Exception as reason:  # a way that ran alone may run out of memory beside the others
            recover(setup)
            setup.failed(f"{case.name}: while timed: {one_line(reason)}")
            return
        times = dict(zip((r.name for r in everyone), spent, strict=True))
        setup.say(f"{case.name} {DTYPES[case.dtype]} {clock}: {times_told(everyone, times)}")
        if case.bounds and setup.device.type == "cuda":
            best = min(times[r.name].median for r in mine)
            told = (f"{name} {least:.4g} ms ({least / best:.0%} reached)" for name, least in case.bounds.items())
            setup.say("  " + ", ".join(told))
        for own in mine:
            yield from _rows(setup, case, clock, own, times, theirs)


def summarize(setup: Setup, rows: Sequence[Row], families: Mapping[str, tuple[str, ...]]) -> None:
    """Report our speedup over the fastest peer of each family, over all cases: of our fastest way, then of each way.

    families: prefixes of the peers' names, by family.
    """
    compared = [found for found in rows if found.peer_source == "same run" and found.metric == "time"]
    for family, names in families.items():
        peers = [found for found in compared if found.peer.startswith(names)]
        for dtype, clock in sorted({(found.dtype, found.clock) for found in peers}):
            chosen = [found for found in peers if (found.dtype, found.clock) == (dtype, clock)]
            setup.say(f"{family} {dtype} {clock}: best of ours {mean_told(ratios_of(chosen))}")
            ways = dict.fromkeys(found.case.rpartition("/")[2] for found in chosen)
            for way in ways if len(ways) > 1 else ():
                own = [found for found in chosen if found.case.rpartition("/")[2] == way]
                setup.say(f"  {way}: {mean_told(ratios_of(own))}")
    _say_fastest(setup, compared)


def ratios_of(rows: Sequence[Row]) -> dict[str, float]:
    """By case, the fastest peer's time over our fastest time."""
    cases = grouped(rows, lambda row: row.case.rpartition("/")[0])
    return {name: min(r.peer_value for r in own) / min(r.value for r in own) for name, own in cases.items()}


def kept(rows: Sequence[Row], beside: Collection[str]) -> list[Row]:
    """The rows of one case to write to the results file.

    beside: our secondary ways. Unless it is our fastest, a secondary way keeps only the row against the fastest peer.
    """
    found: list[Row] = []
    for clock in dict.fromkeys(r.clock for r in rows):
        own = [r for r in rows if r.clock == clock]
        fastest = min(own, key=lambda r: r.value).case
        peers = [r for r in own if r.peer_source == "same run"]
        rival = min(peers, key=lambda r: r.peer_value).peer if peers else ""
        found += [
            r for r in own if r.case == fastest or r.peer == rival or r.case.rpartition("/")[2] not in set(beside)
        ]
    return found


def mean_told(ratios: Mapping[str, float]) -> str:
    """The geometric mean of ratios by case, and the least ratio, as text."""
    worst = min(ratios, key=lambda name: ratios[name])
    return f"{geomean(ratios.values()):.2f}x (geometric mean of {len(ratios)}), least {ratios[worst]:.2f}x at {worst}"


def _say_fastest(setup: Setup, rows: Sequence[Row]) -> None:
    """Report how often each of our ways was the fastest."""
    best: dict[tuple[str, str, str], tuple[float, str]] = {}
    for found in rows:
        case, _, way = found.case.rpartition("/")
        key = (case, found.dtype, found.clock)
        best[key] = min(best.get(key, (math.inf, "")), (found.value, way))
    ways = Counter((clock, way) for (_, _, clock), (_, way) in best.items())
    told = ", ".join(f"{way} {count} ({clock})" for (clock, way), count in ways.most_common())
    setup.say(f"fastest of ours, cases: {told or 'none'}")


def _rows(
    setup: Setup, case: Case, clock: str, own: Ready, times: Mapping[str, Times], theirs: Sequence[Ready]
) -> Iterator[Row]:
    peers = [Peer(peer.name, times[peer.name].median, package=peer.package) for peer in theirs]
    if setup.device.type == "cuda":
        peers += [Peer(name, least, "bound") for name, least in case.bounds.items()]
    for peer in peers:
        yield setup.row(f"{case.name}/{own.name}", times[own.name], clock, peer, dtype=case.dtype)


def times_told(ways: Sequence[Ready], times: Mapping[str, Times]) -> str:
    """Times and errors of ways in one line."""
    return "   ".join(f"{way.name} {str(times[way.name])[:-1]}; error {way.error:.1e})" for way in ways)


def _forget_compiled() -> None:
    """Reset torch.compile, which after the shapes of earlier cases would compile dynamic, slower kernels."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress warnings, such as torch's that sparse tensors are in beta state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def one_line(reason: Exception) -> str:
    """An error in one line."""
    lines = [line.strip() for line in f"{type(reason).__name__}: {reason}".splitlines() if line.strip()]
    return (lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}")[:240]


def recover(setup: Setup) -> None:
    """Release cached GPU memory after a failed call."""
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()


def seconds_to_move(cache: float = 0.0, memory: float = 0.0, flops: float = 0.0) -> float:
    """Lower bound of the time on an H200 for bytes through L2, bytes of memory and FLOP of 16-bit matrix products."""
    gpu = DEVICES["cuda"]
    return max(cache / gpu.cache, memory / gpu.memory, flops / gpu.matrix)


def line(name: str, text: str, lowering: str = "", **operands: Tensor | Sparse) -> Way:
    """A way of ours: one einsum statement with tuned kernels."""

    def make() -> Callable[[], Tensor]:
        formats = {n: str(x.format) for n, x in operands.items() if isinstance(x, Sparse)}
        call = compile_einsum(text, formats, lowering=lowering)
        return tuned(lambda: call(**operands))

    return Way(name, make)


def tuned(call: Callable[[], Any]) -> Callable[[], Any]:
    """Run a call once with autotuning, and return it."""
    with tuning():
        call()
    return call


def goals_told(setup: Setup, name: str, ratios: Mapping[str, float], least: float) -> None:
    """Report whether the geometric mean of ratios by case reaches the goal `least`."""
    if not ratios:
        setup.say(f"goal {name}, {least:.3g}x: not measured")
        return
    met = "met" if geomean(ratios.values()) >= least else "NOT met"
    setup.say(f"goal {name}, {least:.3g}x: {mean_told(ratios)}: {met}")


def untuned(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call with default tiles, ignoring tuned ones."""
    return use_tuning_mode(DEFAULT)(call)


def by_choice(setup: Setup, call: Callable[[], Any]) -> Callable[[], Any]:
    """The call with default tiles, or in a thorough run with tuned ones."""
    return tuned(call) if setup.thorough else untuned(call)


class OneStep(NamedTuple):
    """A statement of one step with its sizes, its operands by name and the dtype of its result."""

    bound: BoundStatement
    operands: Mapping[str, Tensor]
    dtype: torch.dtype


def as_step(text: str, **operands: Tensor | Sparse) -> OneStep:
    """The only step of a statement over the arrays of its operands."""
    formats = {n: str(x.format) for n, x in operands.items() if isinstance(x, Sparse)}
    checked = compile_einsum(text, formats)._checked(operands)
    tensors, names, _ = flatten_used(text, checked.operands, checked.constants)
    return step_of(tensors, names, text, None)


def step_of(tensors: Sequence[Tensor], names: str, text: str, shape: tuple[int, ...] | None) -> OneStep:
    """The only step of a statement over flattened operands; names: their tokens, with one format per operand."""
    forms = tuple((name, next(iter(held))) for name, held in plan.read(names).forms.items())
    done = plan.rewritten(text, names, forms)
    if len(done.steps) != 1:
        raise ValueError(f"`{text}` has {len(done.steps)} steps, expected one")
    found = plan.arrays(tensors, names, text, plan.Candidate(forms, (), done.steps, 0.0))
    whole = shape or plan.sizes(text, names, [t.shape for t in tensors], None).shape
    return OneStep(plan.step_bound(done.steps[0], found, whole), found, plan.result_dtype(tensors, names, text))


def as_graph(text: str, **operands: Tensor | Sparse) -> PreparedGraph:
    """The statement as a graph of torch operators (gather, einsum, scatter), for eager PyTorch and Inductor."""
    return prepare(*as_step(text, **operands))


def graph_of(tensors: Sequence[Tensor], names: str, text: str, shape: tuple[int, ...] | None) -> PreparedGraph:
    """The graph of a one-step statement over flattened operands, as `step_of` takes them."""
    return prepare(*step_of(tensors, names, text, shape))


def switched(name: str, made: Callable[[], OneStep], **changes: Any) -> Way:
    """A way of ours: the kernel of a step with its tuned tile, but for some fields of it."""

    def make() -> Callable[[], Tensor]:
        bound, operands, dtype = made()
        with tuning():
            runner(bound, dtype)(operands)
        run = runner(bound, dtype, replace(tile_of(bound, operands), **changes))
        return lambda: run(operands)

    return Way(name, make)


def inductor(name: str, made: Callable[[], PreparedGraph], native: bool) -> Way:
    """Inductor on a graph. native: fuse gathers and scatters into matrix products."""

    def make() -> Callable[[], Tensor]:
        if native and "triton.native_matmul" not in torch._inductor.list_options():
            raise RuntimeError(f"torch {torch.__version__} has no triton.native_matmul; 2.10 and later have")
        module, arguments = made()
        call = compiled(module, native)
        return lambda: call(*arguments)

    return Way(name, make, "torch", slack=4)


def eager(name: str, made: Callable[[], PreparedGraph]) -> Way:
    """The graph run operator by operator by eager PyTorch."""

    def make() -> Callable[[], Tensor]:
        module, arguments = made()
        return lambda: module(*arguments)

    return Way(name, make, slack=4)
