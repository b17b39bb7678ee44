"""Running the checks."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, ParamSpec

from tokencustody.conformance.case import Case, Factory, Transport, detect
from tokencustody.conformance.expect import PromiseBrokenError, describe
from tokencustody.conformance.registry import Check, registered_checks
from tokencustody.conformance.report import CheckResult, CheckStatus, ConformanceError, ConformanceReport

Options = ParamSpec("Options")


async def check_conformance(
    sink_factory: Factory,
    source_factory: Factory,
    lineage_factory: Factory | None = None,
    *,
    other_namespace: tuple[Factory, Factory] | None = None,
    ledger_factory: Factory | None = None,
    staging_factory: Factory | None = None,
    rollout_id: str = "conformance-rollout",
    only: Sequence[str] | None = None,
    timeout: float = 120.0,
    on_start: Callable[[Check], None] | None = None,
) -> ConformanceReport:
    """Run every check that the transport's capabilities allow, and report what was found.

    A factory takes no argument and returns a fresh client over the one shared backend; each client is closed.
    Factories that can be pickled let the strict fence be raced from several processes. Those import the main
    module, so a script must start the kit under `if __name__ == "__main__":`. `other_namespace` is a sink and
    a source factory over the same backend but another namespace. `ledger_factory` returns a `CaptureLedger`
    over the same backend and namespace, `staging_factory` an object with `stage` and `fetch`, and with
    `fetch_extras`, `fetch_attachments`, `fetch_prefix_token_ids` and `delete` if it has them; its methods are
    called from threads. Each run writes to rollouts of its own, whose ids begin with `rollout_id`, and leaves
    them and what it staged there. `only` names the checks to run; `timeout` (seconds) bounds each; `on_start`
    is called before each.

    Raises ValueError for an unknown name in `only` and for a `rollout_id` outside the rules of rollout ids or
    longer than 190 characters. Whatever the transport raises becomes a failed check.
    """
    checks = _select(only)
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,190}", rollout_id):
        raise ValueError(f"rollout_id {rollout_id!r} is not 1 to 190 characters out of A-Z a-z 0-9 . _ -")
    transport = Transport(
        sink_factory=sink_factory,
        source_factory=source_factory,
        lineage_factory=lineage_factory,
        other_namespace=other_namespace,
        ledger_factory=ledger_factory,
        staging_factory=staging_factory,
        rollout_id=rollout_id,
        suffix=secrets.token_hex(4),
    )
    results = []
    try:
        await detect(transport)
    except Exception as exc:
        failure = CheckResult("clients", (), CheckStatus.FAILED, f"no client could be made: {describe(exc)}")
        return ConformanceReport((failure,), tuple(transport.capabilities.values()), ())
    for check in checks:
        if on_start is not None:
            on_start(check)
        results.append(await _run(check, transport, timeout))
    return ConformanceReport(
        tuple(results),
        tuple(transport.capabilities.values()),
        tuple(dict.fromkeys(transport.rollout_ids)),
        tuple(dict.fromkeys(transport.staging_keys)),
    )


def _or_raise(
    check: Callable[Options, Awaitable[ConformanceReport]],
) -> Callable[Options, Coroutine[Any, Any, list[str]]]:
    @wraps(check)
    async def run_conformance(*arguments: Options.args, **options: Options.kwargs) -> list[str]:
        report = await check(*arguments, **options)
        if not report.ok:
            raise ConformanceError(report)
        return report.passed

    return run_conformance


# As `check_conformance`, but returns the names of the checks that passed, and raises `ConformanceError` if one failed
# or none was run.
run_conformance = _or_raise(check_conformance)


def _select(only: Sequence[str] | None) -> list[Check]:
    checks = registered_checks()
    unknown = sorted(set(only or ()) - {check.name for check in checks})
    if unknown:
        raise ValueError(
            f"no check is named {', '.join(unknown)}; there are {', '.join(c.name for c in checks)}"
        )
    return [check for check in checks if only is None or check.name in only]


async def _run(check: Check, transport: Transport, timeout: float) -> CheckResult:
    missing = [need for need in check.needs if not transport.offers(need)]
    if missing:
        return CheckResult(
            check.name, check.needs, CheckStatus.NOT_APPLICABLE, f"the transport has no {', '.join(missing)}"
        )
    status, detail = CheckStatus.PASSED, ""
    started = time.perf_counter()
    timer = asyncio.timeout(timeout)
    try:
        async with timer, Case(transport, check.name) as case:
            detail = await check.function(case) or ""
    except PromiseBrokenError as exc:
        status, detail = CheckStatus.FAILED, str(exc)
    except Exception as exc:
        status = CheckStatus.FAILED
        detail = f"not finished after {timeout:g} s" if timer.expired() else f"raised {describe(exc)}"
    return CheckResult(check.name, check.needs, status, detail, time.perf_counter() - started)
