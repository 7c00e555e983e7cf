"""From a page of metrics in the Prometheus text format to a `LoadReport`.

A server's page has hundreds of lines and is read many times a second, so only the lines of the
families in the engine's profile are touched. A page without them is the report of an engine that
has no figures yet, not an error; garbage is an error. OpenMetrics is read as well, whatever is
asked for: vLLM's Rust frontend writes it, with exemplars and "# EOF".

Four facts about vLLM's `lora_requests_info` that the format does not show:

1. Its value is a wall time: when the engine was last in the state that the labels describe.
2. Series are never removed. The newest one is the present state; all of them together are a log of
   which adapter was last active when.
3. Versions 0.11.1 and later write the same set into both labels, earlier ones tell running from
   waiting; the union is right for both.
4. With several API server processes a series of more than one of them carries the sum of their
   times, which must not count as the newest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import islice
from operator import itemgetter

from msgspec import Struct

from extproc.bounds import MAX_COUNT, MAX_TOTAL_TOKENS, MAX_WALL_S, total, whole
from extproc.errors import ExpositionError
from extproc.passes import no_rest
from extproc.reports.engines import (
    CacheInfo,
    EngineMetrics,
    LabelledFamily,
    LoraInfo,
    ResidencySeries,
)
from extproc.reports.remembered import Remembered
from extproc.reports.textformat import MAX_REMEMBERED_BYTES, Lines, ValuesAt, parse_labels
from extproc.types import LoadReport

MAX_LORA_SERIES = 2_048
"""Series are never removed, so a server with many adapters may have tens of thousands. Those beyond
the newest few thousand name adapters that left every cache long ago."""

MAX_NAMES = 1024
"""Of one label of a series, the first: as many as a pod's slots and the requests that wait."""
MAX_NAMES_OF_PAGE = 16_384
"""Of all LoRA series together, the newest first, each as often as it is named. Series beyond name
adapters that left every cache long ago."""
MAX_ADAPTERS = 4096
"""Taken from one page: of the log, most recently active first, and of each level of residency."""
MAX_SERIES = 4096
"""Of a family that is summed: engines, each with its ranks. A sum of more is unknown."""

_NAME_BYTES = 100  # of a name in a set, besides its text
_MAX_ENGINES = 64  # behind one server
_MAX_NAME_CHARS = 256  # of an adapter's name; requests cannot name a longer one
_TIME = itemgetter(0)
_UNUSED: ValuesAt = [0.0], 0  # of a series that is not asked for


class Figures(Struct):
    """The contents of a page.

    Attributes:
        running: One value per engine, as in all fields of this type; None where one of them cannot
            be known.
        times_s: When the engine was last in the state that a LoRA series describes, one by one.
        states: The contents of each of them: slots and adapters.
    """

    running: list[float] | None
    waiting: list[float] | None
    kv_usages: list[float] | None
    tokens: list[float] | None
    prompts: list[float] | None
    first_tokens: list[float] | None
    starts_s: list[float] | None
    deferred: list[float] | None
    slots: list[float] | None
    awake: list[float] | None
    times_s: list[float]
    states: list[tuple[int, frozenset[str]]]
    gpu_adapters: frozenset[str] | None
    cpu_adapters: frozenset[str] | None
    kv_cache_tokens: int | None
    unreadable: str


LoraLog = tuple[frozenset[str], tuple[tuple[str, float], ...], int]
"""Of LoRA series: the active adapters, when each was so last, and slots, 0 where none says them."""


def parse_report(
    page: bytes, profile: EngineMetrics, rest: Callable[[], None] = no_rest
) -> LoadReport:
    """Parse the metrics of `profile` from `page`.

    A line that cannot be read, or has an impossible value (NaN, infinite, negative), loses only its
    own value. A sum with that value is unknown, not lower. Counts of several engines behind one
    server are added, their KV cache use is averaged, and times summed over processes are left out.
    Counts are limited to `MAX_COUNT`. `rest` is called again and again.

    Raises:
        ExpositionError: No line of the page is one of the text format. Count a failed scrape and
            keep the last report.
    """
    figures = read_figures(Lines(page, keeps_rows=False, rest=rest), profile)
    return make_report(figures, read_log(figures), profile)


def read_figures(lines: Lines, profile: EngineMetrics) -> Figures:
    """Read all that `profile` names."""

    def values(names: tuple[str, ...]) -> list[float] | None:
        return _values_by_engine(lines, names, profile)

    def part(family: LabelledFamily | None) -> list[float] | None:
        names = () if family is None else (family.family,)
        return _values_by_engine(lines, names, profile, family)

    times_s, states = _lora_series(lines, profile.lora_info)
    gpu, cpu = _read_residency(lines, profile.residency)
    return Figures(
        running=values(profile.running),
        waiting=values(profile.waiting),
        kv_usages=values(profile.kv_usage),
        tokens=values(profile.generated_tokens),
        prompts=values(profile.prompt_tokens),
        first_tokens=values(profile.first_tokens),
        starts_s=values((profile.process_start,)),
        deferred=part(profile.deferred),
        slots=None if any(num for num, _ in states) else values(profile.lora_slots),
        awake=part(profile.awake),
        times_s=times_s,
        states=states,
        gpu_adapters=gpu,
        cpu_adapters=cpu,
        kv_cache_tokens=_read_kv_cache_tokens(lines, profile.cache_info),
        unreadable=lines.unreadable,
    )


def make_report(figures: Figures, lora: LoraLog, profile: EngineMetrics) -> LoadReport:
    """Make the report of a page's figures and of what its LoRA series say together."""
    running, waiting, usages = figures.running, figures.waiting, figures.kv_usages
    tokens, prompts, first = figures.tokens, figures.prompts, figures.first_tokens
    work = tokens + prompts if tokens and prompts is not None and profile.counts_steps else ()
    active, log, max_loras = lora
    return LoadReport(
        num_running=total(running or ()),
        num_waiting=total(waiting or ()),
        has_counts=running is not None and waiting is not None,
        num_deferred=total(figures.deferred) if figures.deferred else None,
        kv_usage_ratio=min(1.0, sum(usages) / len(usages)) if usages else None,
        # Every engine behind one server has the same number of slots.
        max_loras=max_loras or whole(max(figures.slots or (0,)), MAX_COUNT) or None,
        active_adapters=active,
        adapter_log=log,
        gpu_adapters=figures.gpu_adapters,
        cpu_adapters=figures.cpu_adapters,
        process_start_wall_s=min(max(figures.starts_s), MAX_WALL_S) if figures.starts_s else None,
        kv_cache_tokens=figures.kv_cache_tokens,
        generated_tokens=whole(sum(tokens), MAX_TOTAL_TOKENS) if tokens else None,
        work_tokens=whole(sum(work), MAX_TOTAL_TOKENS) if work else None,
        num_first_tokens=whole(sum(first), MAX_TOTAL_TOKENS) if first else None,
        unreadable=figures.unreadable,
        # A request may go to any engine behind the server.
        is_asleep=min(figures.awake or (), default=1.0) == 0.0,
    )


def _values_by_engine(
    lines: Lines,
    names: tuple[str, ...],
    profile: EngineMetrics,
    where: LabelledFamily | None = None,
) -> list[float] | None:
    """Return one value per engine, of the first of `names` that has any; None where one of them
    cannot be known.

    Ranks of one engine count the same requests and may lag behind each other: the highest counts.
    """
    num_unreadable = lines.num_unreadable
    for name in names:
        values: dict[str, float] = {}
        read_at: list[int] = []
        for block, value in lines.series(name):
            labels = lines.labels(block)
            if labels is None or (where is not None and labels.get(where.label) != where.value):
                lines.keep_row(lines.at, _UNUSED)
                continue
            if not 0 <= value < math.inf:
                return None
            engine = labels.get(profile.engine_label, "")
            values[engine] = max(value, values.get(engine, 0.0))
            read_at.append(lines.at)
            if len(read_at) > MAX_SERIES:
                lines.note(f"more than {MAX_SERIES} series of {name}")
                return None
        if lines.num_unreadable > num_unreadable:
            return None
        if values:
            found = list(values.values())
            if len(found) == len(read_at):
                for place, at in enumerate(read_at):
                    lines.keep_row(at, (found, place))
            return found
    return None if names and lines.is_cut else []


def _lora_series(
    lines: Lines, info: LoraInfo | None
) -> tuple[list[float], list[tuple[int, frozenset[str]]]]:
    """Return the times of the newest series, and what they say."""
    times_s: list[float] = []
    states: list[tuple[int, frozenset[str]]] = []
    found = () if info is None else lines.series(info.family)
    series = ((at_s, block, lines.at) for block, at_s in found if 0 < at_s < MAX_WALL_S)
    num_names = 0
    for at_s, block, at in heapq.nlargest(MAX_LORA_SERIES, series):
        assert info is not None
        lines.rest()
        try:
            state = read_state(block, info)
        except ExpositionError as error:
            lines.note(str(error))
            continue
        num_names += len(state[1])
        if num_names > MAX_NAMES_OF_PAGE:
            break
        lines.keep_row(at, (times_s, len(times_s)))
        states.append(state)
        times_s.append(at_s)
    return times_s, states


def read_log(figures: Figures) -> LoraLog:
    """Return what the LoRA series say together."""
    last_seen_s: dict[str, float] = {}
    newest_s, max_loras = 0.0, 0
    for newest_s, (slots, adapters) in sorted(
        zip(figures.times_s, figures.states, strict=True), key=_TIME
    ):
        max_loras = max(max_loras, slots)
        last_seen_s.update(dict.fromkeys(adapters, newest_s))
    log = sorted(last_seen_s.items(), key=lambda seen: (-seen[1], seen[0]))[:MAX_ADAPTERS]
    # Several series have the newest time: servers that write whole seconds.
    active = frozenset([adapter for adapter, at_s in log if at_s == newest_s])
    return active, tuple(log), max_loras


def read_state(block: bytes, info: LoraInfo) -> tuple[int, frozenset[str]]:
    """Return what a LoRA series says: slots and adapters.

    Raises:
        ExpositionError: It cannot be read.
    """
    return _read_adapters(
        block, info.max_label, info.running_label, info.waiting_label, info.separator
    )


def _read_kv_cache_tokens(lines: Lines, info: CacheInfo | None) -> int | None:
    """Return the tokens that the KV caches of all engines hold; None where unknown."""
    if info is None:
        return None
    sizes, num_unreadable = [], lines.num_unreadable
    for block, _ in islice(lines.series(info.family), _MAX_ENGINES):
        labels = lines.labels(block)
        if labels is not None:
            if labels.get(info.prefix_label) == "False":
                return 0
            num_blocks = _parse_count(labels.get(info.blocks_label, ""))
            sizes.append(num_blocks * _parse_count(labels.get(info.block_size_label, "")))
    return None if lines.num_unreadable > num_unreadable else sum(sizes) or None


def _parse_adapters(
    block: bytes, max_label: str, running_label: str, waiting_label: str, separator: str
) -> tuple[int, frozenset[str]]:
    """Return the number of slots and the adapters in the labels of a series."""
    labels = parse_labels(block)  # what it says is remembered, and not its labels besides
    both = labels.get(running_label, ""), labels.get(waiting_label, "")
    parts = (text.split(separator, MAX_NAMES)[:MAX_NAMES] for text in both)
    names = (name.strip() for part in parts for name in part)
    found = frozenset(name for name in names if 0 < len(name) <= _MAX_NAME_CHARS)
    return _parse_count(labels.get(max_label, "")), found


def _parse_count(text: str) -> int:
    """Parse a count in a label; 0 where there is none, as slots on a server without LoRA."""
    try:
        return whole(int(text), MAX_COUNT)
    except ValueError:
        return 0


def _read_residency(
    lines: Lines, residency: ResidencySeries | None
) -> tuple[frozenset[str] | None, frozenset[str] | None]:
    """Return the adapters in GPU slots and those in the CPU cache; None, None without the family.

    A family that is declared but has no series means that nothing is loaded.
    """
    if residency is None or residency.family.encode() not in lines.page:
        return None, None
    is_known = f"# TYPE {residency.family} ".encode() in lines.page
    loaded: dict[str, set[str]] = {residency.gpu_level: set(), residency.cpu_level: set()}
    for block, value in lines.series(residency.family):
        is_known = True
        labels = lines.labels(block) or {}
        adapter, level = labels.get(residency.adapter_label), labels.get(residency.level_label)
        if adapter and len(adapter) <= _MAX_NAME_CHARS and level in loaded and value > 0:
            loaded[level].add(adapter)
            if len(loaded[level]) == MAX_ADAPTERS:
                break
    if not is_known:
        return None, None
    gpu, cpu = (frozenset(loaded[level]) for level in loaded)
    return gpu, cpu


def _size_bytes(state: tuple[int, frozenset[str]]) -> int:
    return len(state[1]) * _NAME_BYTES + sum(map(len, state[1]))


_read_adapters = Remembered(_parse_adapters, MAX_REMEMBERED_BYTES, _size_bytes)
