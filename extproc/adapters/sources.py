"""Where adapters are declared, and what is known of that."""

from __future__ import annotations

from msgspec import Struct


class SourceStatus(Struct, frozen=True):
    """How one source of declarations is: a store, or a kind of objects in a cluster.

    Attributes:
        name: What people know it by.
        has_terms: It may say who may use an adapter, or that one is gone. Others only name models.
        is_read: It has been read as a whole once, or there is none.
        is_complete: Besides, all that was in it then could be used.
        age_s: Seconds since it last answered: how old what is known of it may be.
        problem: Why it cannot be read now; "" if it can.
    """

    name: str
    has_terms: bool
    is_read: bool
    is_complete: bool
    age_s: float
    problem: str = ""

    @property
    def said(self) -> str:
        """What is wrong, for people; "" for nothing."""
        if self.is_read and not self.problem:
            return ""
        if not self.is_read:
            return f"{self.name}: not read yet" + (f": {self.problem}" if self.problem else "")
        return f"{self.name}: as of {self.age_s:.0f} s ago: {self.problem}"
