"""Draw the time of a step on each rank, with the waits for the other ranks."""

import plotly.graph_objects as go

from torchotel._records import PHASES
from torchotel.runs.html.data import Content
from torchotel.runs.html.style import LINE, PHASE_COLOURS, Section, escaped, figure, rounded, scale, sentence

MAX_RANKS = 64
_ROW_PX = 24


def section(content: Content) -> Section | None:
    """Return the section with one bar for each rank, the rank that waits least first; None if there is one rank."""
    comparison = content.ranks
    if comparison is None:
        return None
    ranks = sorted(comparison.ranks, key=lambda rank: (rank.wait_s, rank.rank))[:MAX_RANKS]
    unit, factor = scale(max(rank.step_s for rank in ranks))
    labels = [f"rank {rank.rank} {escaped(rank.host, 24)}" for rank in ranks]
    parts = [(name, PHASE_COLOURS[name], [rank.own_s[name] for rank in ranks]) for name in PHASES]
    parts.append(("waits", LINE, [rank.wait_s for rank in ranks]))
    bars = [
        go.Bar(
            name=name,
            y=labels,
            x=[rounded(time_s * factor) for time_s in times_s],
            orientation="h",
            marker={"color": colour},
            hovertemplate=f"{name} %{{x:.4~g}} {unit}<extra>%{{y}}</extra>",
        )
        for name, colour, times_s in parts
        if any(times_s)
    ]
    drawn = figure(
        bars,
        _ROW_PX * len(ranks) + 110,
        barmode="stack",
        yaxis={"autorange": "reversed", "type": "category"},
        xaxis={"title": {"text": unit}},
    )
    left_out = len(comparison.ranks) - len(ranks)
    lead = (
        f"<b>{escaped(sentence(comparison.conclusion), 300)}.</b> Median times of {comparison.common_steps:,} steps "
        "that all ranks have in common, phases without collectives. The rank at the top waits least."
    )
    if left_out:
        lead += f" {left_out:,} ranks that wait longer are left out."
    return Section("ranks", "Ranks", lead, drawn)
