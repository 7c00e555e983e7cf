"""The client of `extproc watch`: decisions of a running router, live.

Speaks `extproc.v1.Decisions` with betterproto2 over grpclib; protos/README.md explains why client
and server have different protobuf runtimes.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Sequence

from grpclib.client import Channel
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from rich.text import Text

from extproc.address import Address
from extproc.errors import ExtprocError
from extproc.files.refusals import tls_failure
from extproc.gen.client.extproc.v1 import (
    Candidate,
    Decision,
    DecisionsStub,
    Outcome,
    Pick,
    Rejection,
    Shadow,
    WatchRequest,
)
from extproc.phrases import duration, held

__all__ = ["Candidate", "Decision", "WatchError", "render", "watch"]

_ALL_KEPT = 2**32 - 1  # the field's maximum: all that the server remembers


class WatchError(ExtprocError):
    """The router cannot be watched, or no longer; the message is for people."""


async def watch(
    target: str,
    *,
    tls: ssl.SSLContext | None = None,
    models: Sequence[str] = (),
    endpoint: str = "",
    only_rejections: bool = False,
    replay_last: int = 0,
    explain: bool = False,
    outcomes: bool = False,
    about: str = "",
    candidates_interval_s: int = 0,
) -> AsyncIterator[Decision]:
    """Yield decisions, oldest first, until the caller stops or the router ends the call.

    Args:
        tls: Offers `h2` by ALPN; None for plain text.
        models: Only these models and adapters; empty for all.
        endpoint: Only picks that name this `ip:port`; "" for all.
        replay_last: Start with up to this many past decisions.
        explain: With the reason of each in words.
        outcomes: Also how picks end, as news: decisions with an outcome alone.
        about: Only the request with this `x-request-id` or pick id, until it has ended.
        candidates_interval_s: All candidates only once in so many seconds, else the chosen one
            alone; 0 for always all. A router that does not know this sends all.

    Raises:
        WatchError: No router at `target`, it ended the call, or does not know the request.
    """
    try:
        address = Address.parse(target)
    except ValueError as error:
        raise WatchError(str(error)) from None
    request = WatchRequest(
        models=list(models),
        endpoint=endpoint,
        only_rejections=only_rejections,
        replay_last=replay_last,
        explain=explain,
        outcomes=outcomes,
        request=about,
        candidates_interval_seconds=candidates_interval_s,
    )
    channel = Channel(address.host, address.port, ssl=tls)
    try:
        # The server ends calls after some volume, to bound the memory for stuck readers.
        has_news = True
        while has_news:
            has_news = False
            async for decision in DecisionsStub(channel).watch(request):
                has_news = True
                request.after_sequence = max(request.after_sequence, decision.sequence)
                request.after_outcome = decision.last_outcome if outcomes else None
                yield decision
            if about:
                return
            request.replay_last = _ALL_KEPT
        raise WatchError(f"{target}: the router ended the call")
    except GRPCError as error:
        raise WatchError(f"{target}: {error.message or error.status.name}") from error
    except (OSError, StreamTerminatedError, ProtocolError) as error:
        said = tls_failure(error, trust="--tls-ca") or str(error) or type(error).__name__
        raise WatchError(f"{target}: {said}") from error
    finally:
        channel.close()


def render(decision: Decision) -> Text:
    """Return one decision for a terminal; `.plain` is without colours.

    It is one line, and a second one where it comes with its reason in words.

    Model names come from clients: unprintable characters become `?`, so that none can control the
    terminal.
    """
    line = Text(_clock(decision), style="dim")
    if decision.pick is not None:
        _render_pick(line, decision.pick)
    elif decision.rejection is not None:
        _render_rejection(line, decision.rejection)
    elif decision.outcome is not None:
        line.append(f"  {decision.outcome.model}", style="bold")
        line.append("  <-  ")
    if decision.outcome is not None:
        _render_outcome(line, decision.outcome)
    if decision.shadow is not None:
        _render_shadow(line, decision.shadow)
    if decision.decision_seconds:
        line.append(f"  {decision.decision_seconds * 1e6:.0f} us", style="dim")
    line.plain = _printable(line.plain)
    if decision.explanation:
        line.append(f"\n    {_printable(decision.explanation)}", style="italic")
    return line


def is_unfinished(decision: Decision) -> bool:
    """Return whether a decision's request was given a pod and had not ended when it was sent."""
    return decision.pick is not None and decision.outcome is None


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)


def _clock(decision: Decision) -> str:
    if decision.time is None:
        return "--:--:--.---"
    return decision.time.astimezone().strftime("%H:%M:%S.%f")[:-3]


def _render_pick(line: Text, pick: Pick) -> None:
    line.append(f"  {pick.model}", style="bold")
    line.append("  ->  ")
    line.append(_name(pick, pick.endpoints[0] if pick.endpoints else "?"), style="green")
    for address in pick.endpoints[1:]:
        line.append(f", {_name(pick, address)}", style="dim")
    line.append(f"  {pick.policy}/{pick.reason}", style="cyan")
    chosen = next((each for each in pick.candidates if each.address in pick.endpoints[:1]), None)
    if chosen is not None:
        line.append(f"  {_state(pick, chosen)}")
    if pick.adapter is not None:
        num_loaded = sum(each.loaded for each in pick.candidates)
        line.append(f"  loaded on {num_loaded}/{len(pick.candidates)}", style="dim")
    if pick.held_seconds is not None:
        line.append(f"  {held(pick.held_seconds, pick.held_for)}", style="yellow")


def _render_rejection(line: Text, rejection: Rejection) -> None:
    line.append(f"  {rejection.model or '-'}", style="bold")
    line.append(f"  {rejection.status} {rejection.reason}", style="red")
    line.append(f"  {rejection.message}")
    if rejection.retry_after_seconds is not None:
        line.append(f"  retry after {rejection.retry_after_seconds} s", style="dim")
    if rejection.why:
        line.append(f"  {rejection.why}", style="dim")


def _render_outcome(line: Text, outcome: Outcome) -> None:
    is_well = outcome.outcome == "completed" and (outcome.status or 0) < 400
    status = "" if outcome.status is None else f" {outcome.status}"
    if outcome.served_by:
        line.append(f"  {outcome.served_by_name or outcome.served_by}", style="green")
    line.append(f"  {outcome.outcome}{status}", style="cyan" if is_well else "red")
    if outcome.ttft_seconds is not None:
        line.append(f"  first token after {duration(outcome.ttft_seconds)}")
    if outcome.duration_seconds is not None:
        line.append(f"  took {duration(outcome.duration_seconds)}")
    if outcome.attempts > 1:
        line.append(f"  {outcome.attempts} attempts", style="yellow")
    line.append(f"  {outcome.request_id or outcome.pick_id}", style="dim")


def _render_shadow(line: Text, shadow: Shadow) -> None:
    said = shadow.endpoint_name or shadow.endpoint or shadow.error or "wait"
    line.append(f"  shadow {shadow.policy}: {said}")
    if shadow.harm_seconds:
        line.append(f", {shadow.harm_seconds * 1000:+.3g} ms of harm")
    line.append(f", {shadow.num_agreed} of {shadow.num_asked} agree", style="dim")


def _name(pick: Pick, address: str) -> str:
    names = (each.name for each in pick.candidates if each.address == address)
    return next(names, "") or address


def _state(pick: Pick, candidate: Candidate) -> str:
    pending = f"{candidate.num_pending} pending{'' if candidate.known else ' (no report)'}"
    if pick.adapter is None:
        return pending
    where = "on GPU" if candidate.on_gpu else "loaded" if candidate.loaded else "cold"
    return f"{where}, {pending}, {candidate.num_adapter_pending} of this adapter"
