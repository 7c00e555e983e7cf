"""From a page of metrics in the Prometheus text format to a `LoadReport`.

A server's page has hundreds of lines and is read many times a second, so only the lines of the
families in the engine's profile are touched. A page without them is the report of an engine that
has no figures yet, not an error; garbage is an error.

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
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from types import MappingProxyType

from extproc.core.bounds import MAX_COUNT, MAX_TOTAL_TOKENS, MAX_WALL_S, total, whole
from extproc.core.engines import CacheInfo, EngineProfile, LabelledFamily, LoraInfo, Residency
from extproc.core.errors import ExpositionError
from extproc.core.remembered import Remembered
from extproc.core.types import LoadReport

_MAX_NAME_BYTES = 4096  # of a metric's name; a page may be one line of megabytes
_FIRST_LINE = re.compile(rb"\s*([^\n]*)")
_NAME = re.compile(rb"[a-zA-Z_:][\w:]*+(?=[{ \t])")
_OPENING = re.compile(rb"[ \t]*\{[ \t]*")
_LABEL = re.compile(
    rb'[ \t]*([a-zA-Z_]\w*)[ \t]*=[ \t]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t]*(?:,[ \t]*|\Z)'
)
_ESCAPE = re.compile(r'\\([\\n"])')

# Series are never removed, so a server with many adapters may have tens of thousands. Those beyond
# the newest few thousand name adapters that left every cache long ago.
_MAX_LORA_SERIES = 2_048

# A series once written comes again in every scrape: to read its labels costs 5 us, to look them up
# 0.3 us. A remembered result is some four times as large as its text.
_MAX_REMEMBERED_BYTES = 16 * 1024 * 1024

_MAX_ENGINES = 64  # behind one server
_MAX_ADAPTERS = 16_384  # read from one page, most recently active first
_MAX_NAME_CHARS = 256  # of an adapter's name; requests cannot name a longer one
_MAX_QUOTED_BYTES = 120  # of a line in an error message
_LINE_FEED = 10


def parse_report(page: bytes, profile: EngineProfile) -> LoadReport:
    """Parse the metrics of `profile` from `page`.

    Counts of several engines behind one server are added, their KV cache use is averaged.
    Impossible values (NaN, infinite, negative, times summed over processes) are left out, counts
    are limited to `MAX_COUNT`.

    Raises:
        ExpositionError: The page is not in the text format, is cut off, or a wanted line cannot
            be read. Count a failed scrape and keep the last report.
    """
    _require_text_format(page)
    active, log, max_loras = _read_lora_info(page, profile.lora_info)
    gpu, cpu = _read_residency(page, profile.residency)
    kv_usages = _values_by_engine(page, profile.kv_usage, profile)
    tokens = _values_by_engine(page, profile.generated_tokens, profile)
    starts_s = _values_by_engine(page, (profile.process_start,), profile)
    part = profile.deferred
    deferred = [] if part is None else _values_by_engine(page, (part.family,), profile, where=part)
    part = profile.awake
    awake = [] if part is None else _values_by_engine(page, (part.family,), profile, where=part)
    slots = [] if max_loras else _values_by_engine(page, profile.lora_slots, profile)
    return LoadReport(
        num_running=total(_values_by_engine(page, profile.running, profile)),
        num_waiting=total(_values_by_engine(page, profile.waiting, profile)),
        num_deferred=total(deferred) if deferred else None,
        kv_usage_ratio=min(1.0, sum(kv_usages) / len(kv_usages)) if kv_usages else None,
        # Every engine behind one server has the same number of slots.
        max_loras=max_loras or whole(max(slots, default=0), MAX_COUNT) or None,
        active_adapters=active,
        adapter_log=log,
        gpu_adapters=gpu,
        cpu_adapters=cpu,
        process_start_wall_s=min(max(starts_s), MAX_WALL_S) if starts_s else None,
        kv_cache_tokens=_read_kv_cache_tokens(page, profile.cache_info),
        generated_tokens=whole(sum(tokens), MAX_TOTAL_TOKENS) if tokens else None,
        # A request may go to any engine behind the server.
        is_asleep=min(awake, default=1.0) == 0.0,
    )


def _require_text_format(page: bytes) -> None:
    """Raise unless the page looks like the text format: its first line, its end, no NUL."""
    if b"\0" in page:
        raise ExpositionError("binary data instead of a metrics page")
    first_line = _FIRST_LINE.match(page)
    line = first_line[1] if first_line else b""
    if line and not line.startswith(b"#"):
        name = _NAME.match(line, 0, _MAX_NAME_BYTES)
        if name is None:
            raise ExpositionError(f"not a metrics page: it begins with {_quote(line)}")
        _split_line(line[name.end() :])
    if line and not page.endswith(b"\n"):
        raise ExpositionError("the metrics page is cut off: no line feed at its end")


def _values_by_engine(
    page: bytes, names: tuple[str, ...], profile: EngineProfile, where: LabelledFamily | None = None
) -> list[float]:
    """Return one value per engine, of the first of `names` that has any.

    Ranks of one engine count the same requests and may lag behind each other: the highest counts.
    """
    for name in names:
        values: dict[str, float] = {}
        for block, value in _series(page, name):
            labels = _read_labels(block)
            if where is not None and labels.get(where.label) != where.value:
                continue
            if 0 <= value < math.inf:
                engine = labels.get(profile.engine_label, "")
                values[engine] = max(value, values.get(engine, 0.0))
        if values:
            return list(values.values())
    return []


def _read_lora_info(
    page: bytes, info: LoraInfo | None
) -> tuple[frozenset[str], tuple[tuple[str, float], ...], int | None]:
    """Return the active adapters, the log and the number of slots."""
    if info is None:
        return frozenset(), (), None
    series = [(at_s, block) for block, at_s in _series(page, info.family) if 0 < at_s < MAX_WALL_S]
    newest = heapq.nlargest(_MAX_LORA_SERIES, series)
    last_seen_s: dict[str, float] = {}
    max_loras = 0
    for at_s, block in newest:
        adapters, slots = _read_lora_labels(block, info)
        max_loras = max(max_loras, slots)
        for adapter in adapters:
            last_seen_s.setdefault(adapter, at_s)
    log = sorted(last_seen_s.items(), key=lambda seen: (-seen[1], seen[0]))[:_MAX_ADAPTERS]
    # Several series have the newest time: servers that write whole seconds.
    active = frozenset(adapter for adapter, at_s in log if at_s == newest[0][0])
    return active, tuple(log), max_loras or None


def _read_lora_labels(block: bytes, info: LoraInfo) -> tuple[frozenset[str], int]:
    """Return the adapters and the slots of one series."""
    labels = _read_labels(block)
    adapters = _split_adapters(
        labels.get(info.running_label, ""), labels.get(info.waiting_label, ""), info.separator
    )
    return adapters, _parse_count(labels.get(info.max_label, ""))


def _read_kv_cache_tokens(page: bytes, info: CacheInfo | None) -> int | None:
    """Return the tokens that the KV caches of all engines hold; None where unknown."""
    if info is None:
        return None
    sizes = []
    for block, _ in islice(_series(page, info.family), _MAX_ENGINES):
        labels = _read_labels(block)
        if labels.get(info.prefix_label) == "False":
            return 0
        num_blocks = _parse_count(labels.get(info.blocks_label, ""))
        sizes.append(num_blocks * _parse_count(labels.get(info.block_size_label, "")))
    return sum(sizes) or None


def _find_names(running: str, waiting: str, separator: str) -> frozenset[str]:
    names = map(str.strip, running.split(separator) + waiting.split(separator))
    return frozenset(name for name in names if 0 < len(name) <= _MAX_NAME_CHARS)


def _parse_count(text: str) -> int:
    """Parse a count in a label; 0 where there is none, as slots on a server without LoRA."""
    try:
        return whole(int(text), MAX_COUNT)
    except ValueError:
        return 0


def _read_residency(
    page: bytes, residency: Residency | None
) -> tuple[frozenset[str] | None, frozenset[str] | None]:
    """Return the adapters in GPU slots and those in the CPU cache; None, None without the family.

    A family that is declared but has no series means that nothing is loaded.
    """
    if residency is None or residency.family.encode() not in page:
        return None, None
    is_known = f"# TYPE {residency.family} ".encode() in page
    loaded: dict[str, set[str]] = {residency.gpu_level: set(), residency.cpu_level: set()}
    for block, value in _series(page, residency.family):
        is_known = True
        labels = _read_labels(block)
        adapter, level = labels.get(residency.adapter_label), labels.get(residency.level_label)
        if adapter and len(adapter) <= _MAX_NAME_CHARS and level in loaded and value > 0:
            loaded[level].add(adapter)
    if not is_known:
        return None, None
    gpu, cpu = (sorted(loaded[level])[:_MAX_ADAPTERS] for level in loaded)
    return frozenset(gpu), frozenset(cpu)


def _series(page: bytes, family: str) -> Iterator[tuple[bytes, float]]:
    """Yield label block and value of each series of `family`. The page ends with a line feed.

    Ends with the first group of lines: "All lines for a given metric must be provided as one
    single group" (Prometheus, "Exposition formats"), and to search the rest costs 9 us.
    """
    name = family.encode()
    at, in_group = page.find(name), False
    while at >= 0:
        rest, end = at + len(name), page.find(b"\n", at)
        # Else a comment, a label's value or a longer name that contains this one.
        if page[rest] in b"{ \t" and (in_group or _begins_line(page, at)):
            yield _split_line(page[rest:end])
            at = end + 1
            in_group = page.startswith(name, at)
            if not in_group:
                return
        else:
            at, in_group = page.find(name, end), False


def _begins_line(page: bytes, at: int) -> bool:
    while at and page[at - 1] in b" \t":
        at -= 1
    return at == 0 or page[at - 1] == _LINE_FEED


def _split_line(rest: bytes) -> tuple[bytes, float]:
    """Split the rest of a line, after the name, into label block (without its brace) and value.

    A timestamp after the value is ignored.
    """
    # A value or a timestamp has no brace in it, so the last one closes the labels.
    block, _, after = rest.rpartition(b"}")
    numbers = after.split()
    if not 1 <= len(numbers) <= 2 or b"_" in numbers[0]:  # float() takes 1_000, Prometheus not
        raise ExpositionError(f"no value in {_quote(rest)}")
    try:
        return block, float(numbers[0])
    except ValueError:
        raise ExpositionError(f"not a number in {_quote(rest)}") from None


def _parse_labels(block: bytes) -> Mapping[str, str]:
    """Parse labels from their opening brace on; the closing one is cut off."""
    labels: dict[str, str] = {}
    opening = _OPENING.match(block)
    if block and opening is None:
        raise ExpositionError(f"labels do not begin: {_quote(block)}")
    at = opening.end() if opening else 0
    while at < len(block):
        label = _LABEL.match(block, at)
        if label is None:
            raise ExpositionError(f"labels cannot be read: {_quote(block)}")
        try:
            value = label[2].decode()
        except UnicodeDecodeError:
            raise ExpositionError(f"labels are not UTF-8: {_quote(block)}") from None
        if "\\" in value:
            value = _ESCAPE.sub(lambda escape: escape[1].replace("n", "\n"), value)
        labels[label[1].decode()] = value
        at = label.end()
    return MappingProxyType(labels)


def _quote(text: bytes) -> str:
    return repr(text[:_MAX_QUOTED_BYTES].decode(errors="replace"))


_read_labels = Remembered(_parse_labels, _MAX_REMEMBERED_BYTES)
_split_adapters = Remembered(_find_names, _MAX_REMEMBERED_BYTES)
