"""Several processes that share devices: the question before they start, asked of each device's sum.

Each process could ask for itself, but would find free what its neighbour is about to take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dflash_lab.memory.account import Account
from dflash_lab.memory.advise import Advice
from dflash_lab.memory.gate import DoesNotFit, suggestion
from dflash_lab.memory.planner import MARGIN, usable
from dflash_lab.memory.shapes import GIB


@dataclass(frozen=True)
class Tenant:
    """What a process is predicted to hold on a device. `advise` gives advice on it for a budget in GiB, where
    something can be changed; `extra` are bytes beside its account (libraries that talk to other devices).
    """

    name: str
    device: str
    account: Account
    advise: Callable[[float], Advice] | None = None
    extra: int = 0

    @property
    def peak(self) -> int:
        return self.account.peak + self.extra


def clear_devices(
    tenants: Sequence[Tenant],
    budgets_gib: Mapping[str, float],
    *,
    force: bool = False,
    margin: float = MARGIN,
) -> list[str]:
    """Return the devices that are predicted to hold too much, of which `force` says to start all the same.

    `budgets_gib` are by device. Raises `DoesNotFit` for the first of them without `force`.
    """
    over = []
    for device in dict.fromkeys(tenant.device for tenant in tenants):
        here = [tenant for tenant in tenants if tenant.device == device]
        peak, budget_gib = sum(tenant.peak for tenant in here), budgets_gib[device]
        if peak <= usable(budget_gib, margin):
            continue
        over.append(device)
        if not force:
            raise _refusal(device, here, peak, budget_gib, margin)
    return over


def _refusal(device: str, here: Sequence[Tenant], peak: int, budget_gib: float, margin: float) -> DoesNotFit:
    """Advice is on the tenant that can be changed, for the memory that the others leave it."""
    told = max(here, key=lambda tenant: (tenant.advise is not None, tenant.peak))
    left_gib = budget_gib - (peak - told.account.peak) / GIB / (1 - margin)
    if told.advise is not None and left_gib > 0:
        advice = told.advise(left_gib)
    else:
        account = told.account
        advice = Advice(account, budget_gib, False, 0, (), (), account, account.explain())
    holds = " + ".join(f"{tenant.name} {tenant.peak / GIB:.2f}" for tenant in here)
    budget = f"{budget_gib:.2f} GiB ({100 * margin:.0f}% kept free)"
    error = DoesNotFit(
        f"{device} is predicted to hold {holds} = {peak / GIB:.2f} GiB, the budget is {budget}. "
        f"{suggestion(advice)} Or place a process elsewhere; ignore_memory starts it all the same.",
        advice,
    )
    parts = {tenant.name: round(tenant.peak / GIB, 3) for tenant in here}
    whole = {"predicted_peak_gib": round(peak / GIB, 3), "budget_gib": round(budget_gib, 3)}
    error.details |= {"device": device, **whole, **parts}
    return error
