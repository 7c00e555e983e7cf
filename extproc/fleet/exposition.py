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
from itertools import islice
from operator import itemgetter

from extproc.bounds import MAX_COUNT, MAX_TOTAL_TOKENS, MAX_WALL_S, total, whole
from extproc.errors import ExpositionError
from extproc.fleet.engines import CacheInfo, EngineProfile, LabelledFamily, LoraInfo, Residency
from extproc.fleet.remembered import Remembered
from extproc.fleet.textformat import MAX_REMEMBERED_BYTES, Lines, read_labels, split_line
from extproc.types import LoadReport

# Series are never removed, so a server with many adapters may have tens of thousands. Those beyond
# the newest few thousand name adapters that left every cache long ago.
_MAX_LORA_SERIES = 2_048

# Of one server, from one page to the next: some 400 bytes each.
_MAX_KEPT_SERIES = 512

_MAX_ENGINES = 64  # behind one server
_MAX_ADAPTERS = 16_384  # read from one page, most recently active first
_MAX_NAME_CHARS = 256  # of an adapter's name; requests cannot name a longer one


LoraMemory = dict[bytes, tuple[float, int, frozenset[str]]]
"""Of one server: its LoRA series, without the name, as they were read from the last page."""


def parse_report(
    page: bytes, profile: EngineProfile, memory: LoraMemory | None = None
) -> LoadReport:
    """Parse the metrics of `profile` from `page`.

    Of hundreds of LoRA series one or two have changed since the last page: with the same `memory`
    for all pages of one server, the others are not read again. The result is the same.

    A line that cannot be read, or has an impossible value (NaN, infinite, negative), costs what it
    would say and no more: a sum that it is a part of is unknown, not lower. Counts of several
    engines behind one server are added, their KV cache use is averaged, and times summed over
    processes are left out. Counts are limited to `MAX_COUNT`.

    Raises:
        ExpositionError: No line of the page is one of the text format. Count a failed scrape and
            keep the last report.
    """
    lines = Lines(page)
    active, log, max_loras = _read_lora_info(lines, profile.lora_info, memory)
    gpu, cpu = _read_residency(lines, profile.residency)
    running = _values_by_engine(lines, profile.running, profile)
    waiting = _values_by_engine(lines, profile.waiting, profile)
    kv_usages = _values_by_engine(lines, profile.kv_usage, profile)
    tokens = _values_by_engine(lines, profile.generated_tokens, profile)
    prompts = _values_by_engine(lines, profile.prompt_tokens, profile)
    first = _values_by_engine(lines, profile.first_tokens, profile)
    work = tokens + prompts if tokens and prompts is not None and profile.counts_steps else ()
    starts_s = _values_by_engine(lines, (profile.process_start,), profile)
    part = profile.deferred
    deferred = None if part is None else _values_by_engine(lines, (part.family,), profile, part)
    slots = None if max_loras else _values_by_engine(lines, profile.lora_slots, profile)
    part = profile.awake
    awake = None if part is None else _values_by_engine(lines, (part.family,), profile, part)
    return LoadReport(
        num_running=total(running or ()),
        num_waiting=total(waiting or ()),
        has_counts=running is not None and waiting is not None,
        num_deferred=total(deferred) if deferred else None,
        kv_usage_ratio=min(1.0, sum(kv_usages) / len(kv_usages)) if kv_usages else None,
        # Every engine behind one server has the same number of slots.
        max_loras=max_loras or whole(max(slots or (0,)), MAX_COUNT) or None,
        active_adapters=active,
        adapter_log=log,
        gpu_adapters=gpu,
        cpu_adapters=cpu,
        process_start_wall_s=min(max(starts_s), MAX_WALL_S) if starts_s else None,
        kv_cache_tokens=_read_kv_cache_tokens(lines, profile.cache_info),
        generated_tokens=whole(sum(tokens), MAX_TOTAL_TOKENS) if tokens else None,
        work_tokens=whole(sum(work), MAX_TOTAL_TOKENS) if work else None,
        num_first_tokens=whole(sum(first), MAX_TOTAL_TOKENS) if first else None,
        unreadable=lines.unreadable,
        # A request may go to any engine behind the server.
        is_asleep=min(awake or (), default=1.0) == 0.0,
    )


def _values_by_engine(
    lines: Lines,
    names: tuple[str, ...],
    profile: EngineProfile,
    where: LabelledFamily | None = None,
) -> list[float] | None:
    """Return one value per engine, of the first of `names` that has any; None where one of them
    cannot be known.

    Ranks of one engine count the same requests and may lag behind each other: the highest counts.
    """
    num_unreadable = lines.num_unreadable
    for name in names:
        values: dict[str, float] = {}
        for block, value in lines.series(name):
            labels = lines.labels(block)
            if labels is None or (where is not None and labels.get(where.label) != where.value):
                continue
            if not 0 <= value < math.inf:
                return None
            engine = labels.get(profile.engine_label, "")
            values[engine] = max(value, values.get(engine, 0.0))
        if lines.num_unreadable > num_unreadable:
            return None
        if values:
            return list(values.values())
    return None if names and lines.is_cut else []


def _read_lora_info(
    lines: Lines, info: LoraInfo | None, memory: LoraMemory | None
) -> tuple[frozenset[str], tuple[tuple[str, float], ...], int | None]:
    """Return the active adapters, the log and the number of slots."""
    if info is None:
        return frozenset(), (), None
    rows = None if memory is None else _remembered_series(lines.page, info, memory)
    last_seen_s: dict[str, float] = {}
    max_loras, newest_s = 0, 0.0
    for at_s, slots, adapters in _lora_series(lines, info) if rows is None else rows:
        newest_s = at_s
        max_loras = max(max_loras, slots)
        last_seen_s.update(dict.fromkeys(adapters, at_s))
    log = sorted(last_seen_s.items(), key=lambda seen: (-seen[1], seen[0]))[:_MAX_ADAPTERS]
    # Several series have the newest time: servers that write whole seconds.
    active = frozenset(adapter for adapter, at_s in log if at_s == newest_s)
    return active, tuple(log), max_loras or None


def _lora_series(lines: Lines, info: LoraInfo) -> list[tuple[float, int, frozenset[str]]]:
    """Return time, slots and adapters of the newest series, the newest last."""
    series = [(at_s, block) for block, at_s in lines.series(info.family) if 0 < at_s < MAX_WALL_S]
    rows = []
    for at_s, block in heapq.nlargest(_MAX_LORA_SERIES, series):
        try:
            rows.append((at_s, *_read_adapters(block, *_texts(info))))
        except ExpositionError as error:
            lines.note(str(error))
    return rows[::-1]


def _remembered_series(
    page: bytes, info: LoraInfo, memory: LoraMemory
) -> list[tuple[float, int, frozenset[str]]] | None:
    """Return what `_lora_series` does, reading only what is not in `memory`; None for a page that
    is not one group of so many lines that can all be read."""
    name = b"\n" + info.family.encode()
    first, last = page.find(name), page.rfind(name)
    num_lines = 1 + page.count(b"\n", first + 1, last + 1)
    texts = page[first + len(name) : page.find(b"\n", last + 1)].split(name)
    if first < 0 or len(texts) != num_lines or num_lines > _MAX_KEPT_SERIES:
        return None
    known = dict(memory)
    memory.clear()
    for text in texts:
        row = known.get(text)
        if row is None:
            try:
                block, at_s = split_line(text)
                row = at_s, *_read_adapters(block, *_texts(info))
            except ExpositionError:
                return None
            if text[:1] not in (b"{", b" ", b"\t") or not 0 < at_s < MAX_WALL_S:
                return None
        memory[text] = row
    return sorted(memory.values(), key=itemgetter(0))


def _texts(info: LoraInfo) -> tuple[str, str, str, str]:
    return info.max_label, info.running_label, info.waiting_label, info.separator


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
    labels = read_labels(block)
    both = labels.get(running_label, ""), labels.get(waiting_label, "")
    names = (name.strip() for text in both for name in text.split(separator))
    found = frozenset(name for name in names if 0 < len(name) <= _MAX_NAME_CHARS)
    return _parse_count(labels.get(max_label, "")), found


def _parse_count(text: str) -> int:
    """Parse a count in a label; 0 where there is none, as slots on a server without LoRA."""
    try:
        return whole(int(text), MAX_COUNT)
    except ValueError:
        return 0


def _read_residency(
    lines: Lines, residency: Residency | None
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
    if not is_known:
        return None, None
    gpu, cpu = (sorted(loaded[level])[:_MAX_ADAPTERS] for level in loaded)
    return frozenset(gpu), frozenset(cpu)


_read_adapters = Remembered(_parse_adapters, MAX_REMEMBERED_BYTES)
