"""Fairness among tenants that wait: virtual token counters.

Source: VTC (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024), Algorithm 2 and
its variants with weights and with predicted lengths. The tenant with the least service goes next.
"""

from __future__ import annotations

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""The weights of a token of a prompt and of a response: `w_p` and `w_q` of the paper."""

MAX_TENANTS = 10_000
"""Tenants that are remembered while they hold nothing. Those with least service are forgotten
first: they would mostly start from the minimum again anyway."""

EXACT_TENANTS = 64
"""With more active ones the minimum is looked for less often: to find it takes 2 us for so many."""


class TokenCounters:
    """A counter of the service that each tenant has got, in weighted tokens over its weight.

    A tenant is active while requests of it are held. One that becomes active is lifted to what each
    active one would have got by now in equal shares: being idle earns no credit. That is at least
    the minimum of those that are active, or the last that was, if none is. The minimum alone stands
    still while ever new tenants start from it. All of them would go before one that got two.

    The bound (the paper's, for backlogged clients) holds over any time in which two tenants are
    both active. Their service differs by at most 2 max(w_p L, w_q M) weighted tokens. L is the
    longest prompt, M the most tokens in all running batches together, with room for a request's
    output kept from its start. With weights, each tenant's service is divided by its own, and the
    bound by the smallest. It holds while the tenant with the least is always the next to be
    dispatched; a tenant whose requests cannot use the present room gets less. Outputs are charged
    at dispatch as expected, and corrected at the end. With that, the bound for the charged service
    is 2 (w_p L + w_q (E + R)). E is the longest expected output. R is the largest total difference
    from it of the outputs that run at a time.

    Strict priorities need counters each. A tenant that waits for higher ones would hold the minimum
    down, and any tenant that becomes active would go before all tenants of the higher ones.
    """

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._num_held: dict[str, int] = {}  # of active tenants alone
        self._level = 0.0  # of equal shares
        self._last = ""  # tenant that was active, of those that are not
        self._least, self._num_until_found = 0.0, 0  # the minimum, and when to look for it again

    def hold(self, tenant: str) -> None:
        """Count a request that is held from now on."""
        if tenant in self._num_held:
            self._num_held[tenant] += 1
            return
        self._level = max(self._level, self._minimum())
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._level)
        self._num_held[tenant] = 1

    def release(self, tenant: str) -> None:
        """Count a request that is not held any more, dispatched or not. Call after `add`."""
        self._num_held[tenant] -= 1
        if not self._num_held[tenant]:
            del self._num_held[tenant]
            self._last = tenant
            self._forget()

    def add(self, tenant: str, tokens: float) -> None:
        """Count weighted tokens (`cost`) over the weight; less than 0 where too many were."""
        counters, num_held = self._counters, self._num_held
        known = counters.get(tenant)
        counters[tenant] = (self._minimum() if known is None else known) + tokens
        if tenant in num_held:
            self._level += tokens / len(num_held)
        elif len(counters) - len(num_held) > MAX_TENANTS:
            self._forget()

    def counter(self, tenant: str) -> float:
        """Return what it has got; the minimum for a tenant that nothing is known of."""
        known = self._counters.get(tenant)
        return self._minimum() if known is None else known

    def __len__(self) -> int:
        return len(self._counters)

    def _minimum(self) -> float:
        if not self._num_held:
            return self._counters.get(self._last, 0.0)
        most = len(self._num_held) // EXACT_TENANTS
        self._num_until_found = min(self._num_until_found, most) - 1
        if self._num_until_found < 0:
            self._least = min(map(self._counters.__getitem__, self._num_held))
            self._num_until_found = most
        return self._least

    def _forget(self) -> None:
        """Forget half of the idle if there are too many, so that this takes little time a call."""
        if len(self._counters) - len(self._num_held) <= MAX_TENANTS:
            return
        kept = {*self._num_held, self._last}
        idle = [each for each in self._counters if each not in kept]
        idle.sort(key=self._counters.__getitem__)
        for tenant in idle[: len(idle) - MAX_TENANTS // 2]:
            del self._counters[tenant]


def cost(input_tokens: float, output_tokens: float) -> float:
    """Return the weighted tokens of a request."""
    return INPUT_WEIGHT * input_tokens + OUTPUT_WEIGHT * output_tokens
