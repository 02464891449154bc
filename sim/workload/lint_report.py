"""A lint of prompts as people read it: what is found, what a token of one's own costs, what whole blocks cost."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from sim.workload.lint import CAVEAT, Lint


def print_lint(console: Console, found: Lint) -> None:
    """Never without its caveat."""
    console.print(f"prompts, and a cache that forgets nothing, in blocks of {found.block_size}", style="bold")
    console.print(_summary(found), highlight=False)
    if found.num_found_tokens:
        console.print()
        console.print(_volatile(found), highlight=False)
    if found.num_sharing:
        console.print()
        console.print(_blocks(found), highlight=False)
        console.print(_why(found), highlight=False)
    console.print(CAVEAT, style="dim", highlight=False)


def _summary(found: Lint) -> str:
    if not found.num_sharing:
        return f"no two of {found.num_requests:,} prompts begin alike: nothing can be found"
    return (
        f"{found.num_sharing:,} of {found.num_requests:,} prompts begin like an earlier one, half of them for "
        f"{found.shared_p50:,} tokens or more; {_share(found, found.num_found_tokens)} of all prompt tokens can be "
        "found"
    )


def _volatile(found: Lint) -> Table:
    """A token that no two prompts have alike: what stays to be found, and what has to be computed instead."""
    table = _table("a token of its own", "found", "prefill tokens a request", "more")
    computed = found.num_computed(found.num_found_tokens)
    table.add_row("nowhere", _share(found, found.num_found_tokens), f"{computed:,.0f}", "")
    for position, num_found in reversed(found.volatile):
        now = found.num_computed(num_found)
        more = f"{100 * (now / computed - 1):+,.0f} %"
        table.add_row(f"at position {position:,}", _share(found, num_found), f"{now:,.0f}", more)
    return table


def _blocks(found: Lint) -> Table:
    table = _table("tokens a block", "found", "share a beginning, but no block")
    for each in found.blocks:
        short = f"{each.num_short:,} of {found.num_sharing:,}"
        table.add_row(f"{each.block_size:,}", _share(found, each.num_found_tokens), short)
    return table


def _why(found: Lint) -> str:
    size = found.block_size
    return (
        f"Only full blocks have keys: of a shared beginning whole blocks are found, and of one shorter than a block "
        f"nothing, however often it comes. {size - 1} shared tokens in blocks of {size} are never a hit."
    )


def _share(found: Lint, num_tokens: int) -> str:
    return f"{100 * num_tokens / found.num_prompt_tokens:.1f} %"


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table
