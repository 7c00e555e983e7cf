"""The links that are open, and what is told over them.

Picks go to each router over one link, the oldest that it listens to, which begins with those in
flight. Nobody acknowledges them: a link that is slow to acknowledge entries gets no more than
`MAX_UNREAD_BYTES` of them, the rest is dropped, ends too, and once the link has read it begins
again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import inf

from extproc.adapters.peers import AdapterUpdate
from extproc.fleet.peerpicks import PeerPick, PeerPickEnd
from extproc.peers.encoding import MAX_TOLD, PickUpdate, encode, encode_word, split
from extproc.peers.link import MAX_UNREAD_BYTES, PeerLink
from extproc.queue import Waiting

MAX_FIRST_BYTES = MAX_UNREAD_BYTES // 2
"""Of the picks that a link begins with, some 5,000; the oldest beyond that are not told."""
BEGIN_INTERVAL_S = 1.0
"""Links that open within this begin together: to tell 20,000 picks takes some 30 ms."""


class Links:
    """All links of this process, whoever dialled.

    Args:
        clock: Monotonic seconds.

    Attributes:
        num_told: Picks told, once for each router.
        num_untold: Picks and ends not told because a link was slow.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sessions: list[PeerLink] = []
        self._telling: dict[str, PeerLink] = {}
        self._begun_at_s = -inf
        self.num_told = self.num_untold = 0

    def __iter__(self) -> Iterator[PeerLink]:
        return iter(list(self._sessions))

    @property
    def is_telling(self) -> bool:
        """Whether there is a router to tell."""
        return bool(self._telling)

    @property
    def is_owing(self) -> bool:
        """Whether a link is to begin."""
        return not all(session.has_begun for session in self._telling.values())

    def say(self, word: AdapterUpdate) -> None:
        """Say to every router what is with adapters, over each link: one of them may be another's
        who only says that it is that router.
        """
        message = encode_word(word)
        for session in self:
            if session.is_heard:
                session.post(message)

    def tell(
        self,
        picks: Iterable[PeerPick],
        ends: Iterable[PeerPickEnd],
        waiting: Waiting | None = None,
        *,
        in_flight: Callable[[], Sequence[PeerPick]],
    ) -> None:
        """Tell every router with a link, and begin the links that have not begun.

        Args:
            waiting: Who waits here, if that has changed or links are to begin.
            in_flight: Returns the picks that links begin with, the oldest first.

        Raises:
            ExceptionGroup: Links failed; the others have been told.
        """
        sessions = list(self._telling.values())
        begun = [session for session in sessions if session.has_begun]
        told = list(split(picks, ends))
        if waiting is not None:
            told.append(PickUpdate(waiting=waiting))
        failures = self._tell(begun, ((each, encode(each)) for each in told))
        now = self._clock()
        if len(begun) < len(sessions) and now - self._begun_at_s >= BEGIN_INTERVAL_S:
            self._begun_at_s = now
            new = [session for session in sessions if not session.has_begun]
            for session in new:
                session.begin()
            failures += self._tell(new, self._first(len(new), waiting, list(in_flight())))
        if failures:
            raise ExceptionGroup("links failed", failures)

    def begin_again(self) -> None:
        """Begin every link again with the next `tell`s: something could not be told."""
        for session in self._telling.values():
            session.begin_again()

    def add(self, session: PeerLink) -> None:
        """Add a link that is not open yet."""
        self._sessions.append(session)

    def remove(self, session: PeerLink) -> None:
        """Forget a link that has closed."""
        self._sessions.remove(session)

    def opened(self, router_id: str, session: PeerLink) -> None:
        """Tell a router our picks over a link that it listens to, unless there is another one."""
        if session.is_heard:
            self._telling.setdefault(router_id, session)

    def lost(self, router_id: str, session: PeerLink) -> bool:
        """Tell the router over another link; return whether this was the last one from it."""
        links = [each for each in self._sessions if each.link and each.link.router_id == router_id]
        if self._telling.get(router_id) is session:
            del self._telling[router_id]
            for other in links:
                self.opened(router_id, other)
        return session.is_believed and not any(each.is_believed for each in links)

    def _first(
        self, num_links: int, waiting: Waiting | None, picks: list[PeerPick]
    ) -> list[tuple[PickUpdate, bytes]]:
        """Return the messages that so many links begin with, the oldest pick first."""
        told, num_bytes = [], 0
        while picks:
            tidings = PickUpdate(picks[-MAX_TOLD:])
            message = encode(tidings)
            num_bytes += len(message)
            if num_bytes > MAX_FIRST_BYTES:
                break
            told.append((tidings, message))
            del picks[-MAX_TOLD:]
        self.num_untold += len(picks) * num_links
        first = PickUpdate(is_first=True, waiting=waiting)
        return [(first, encode(first)), *reversed(told)]

    def _tell(
        self, sessions: Collection[PeerLink], messages: Iterable[tuple[PickUpdate, bytes]]
    ) -> list[Exception]:
        """Tell links, each until it fails; return the failures."""
        failed: dict[PeerLink, Exception] = {}
        for tidings, message in messages:
            for session in sessions:
                try:
                    if session not in failed and session.link is not None:
                        self._count(tidings, is_told=session.post(message))
                except Exception as error:
                    failed[session] = error
        return list(failed.values())

    def _count(self, tidings: PickUpdate, *, is_told: bool) -> None:
        if is_told:
            self.num_told += len(tidings.picks)
        else:
            self.num_untold += len(tidings.picks) + len(tidings.ends)
