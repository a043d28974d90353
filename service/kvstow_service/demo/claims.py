"""What the demo claims, and whether it was so."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence, what was seen, and whether that bears it out."""

    text: str
    seen: str
    holds: bool


def print_claims(claims: list[Claim], console: Console) -> bool:
    """Print a summary; whether all claims hold."""
    if console.is_terminal:
        table = Table(title="What was claimed, and what was seen", title_justify="left", show_lines=True)
        for name in ("claim", "seen", ""):
            table.add_column(name)
        for claim in claims:
            table.add_row(claim.text, claim.seen, "[green]yes" if claim.holds else "[red]NO")
        console.print(table)
    else:
        for claim in claims:
            line = f"{'yes' if claim.holds else 'NO':4}{claim.text}: {claim.seen}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    holds = all(claim.holds for claim in claims)
    failed = sum(not claim.holds for claim in claims)
    if holds:
        console.print(f"All {len(claims)} claims hold.", style="green", highlight=False)
    else:
        console.print(f"{failed} of {len(claims)} claims do not hold.", style="red", highlight=False)
    return holds
