"""The communication cost of a result: MiB of the clients' messages, up and down, per phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from server_app.report.drawing import COLOURS, legend_beside, new_figure, short
from server_app.report.evaluation import EXACT, Row
from server_app.report.tables import headline, places_of, titled, unit_of, worded
from server_app.settings.choices import Choice
from strategies.core.durable import MIB
from strategies.core.errors import StoreError
from strategies.run.run_folder import RoundFolder, RunFolder
from strategies.run.stage import TRAFFIC_FILE, last_finished_round
from strategies.run.traffic import UPLOAD_PHASE, Moved, Traffic
from strategies.scores.values import LOWER_IS_BETTER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MARKERS = "osD^vP*X<>ph8"
LEAST_SECONDS = 0.1  # lower end of the logarithmic axis; a method that trains nothing on the server takes less
# What the costs are -> the label of their axis, their name, and the least that is drawn.
_AXES = {
    "communication": ("MiB per client: all messages, up and down; the result is not sent back", "communication", 0.0),
    "time": ("CPU seconds of the server stage, all threads", "the server's time", LEAST_SECONDS),
}
Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Point:
    """A result in a plot of its headline score against cost.

    Attributes:
        kind: ``"baseline"``, ``"ensemble"`` or ``"student"``.
        cost: MiB per client, up and down, for the result; or CPU seconds of the server stage.
        score: In %, or in its own unit.
        spread: Sample standard deviation of the scores; None for a single one.
        curves: Cost and score of the rounds before the result, a curve per run.
    """

    name: str
    kind: str
    cost: float
    score: float
    spread: float | None = None
    curves: tuple[Curve, ...] = ()


def differ_in_cost(points: Sequence[Point], least: float = 0.0) -> bool:
    """Return whether a plot over the cost shows anything: two costs that differ, or a curve."""
    return len({f"{max(least, point.cost):.2g}" for point in points}) > 1 or any(point.curves for point in points)


def plot_costs(
    points: Sequence[Point], over: str = "communication", *, where: str = "held-out examples", metric: str = "accuracy"
) -> Figure:
    """Draw every result over its communication cost, or over the CPU time of its server stage.

    Args:
        points: At least one; each has a positive cost, or a time, of which those below ``LEAST_SECONDS`` are drawn
            there, at the tick "≤ 0.1".
        over: ``"communication"`` or ``"time"``.
        where: What the scores are counted on.
        metric: The headline score.

    Returns:
        A figure whose horizontal axis is logarithmic, in MiB per client or in seconds; bars are sample standard
        deviations. Results of many rounds have a curve.
    """
    label, name, least = _AXES[over]
    figure, axes = new_figure(8.0, max(4.0, 1.0 + 0.22 * len(points)))
    numbers = Counter[str]()
    # The best comes first, so the legend has the order of the figure.
    sign = 1 if metric in LOWER_IS_BETTER else -1
    shown = [replace(point, cost=max(point.cost, least)) for point in points]
    for point in sorted(shown, key=lambda point: sign * point.score):
        marker = MARKERS[numbers[point.kind] % len(MARKERS)]
        numbers[point.kind] += 1
        _draw(axes, point, marker, metric)
    _scale(axes, shown, least)
    words = worded(metric)
    axes.set(xlabel=label, ylabel=titled(metric, where), title=f"{words[:1].upper()}{words[1:]} against {name}")
    legend_beside(axes)
    return figure


def _label(point: Point, metric: str) -> str:
    places = places_of(metric) - 1
    spread = f" ± {point.spread:.{places}f}" if point.spread is not None else ""
    return f"{short(point.name)}, {point.score:.{places}f}{spread} {unit_of(metric)}".rstrip()


def _draw(axes: Axes, point: Point, marker: str, metric: str) -> None:
    colour = COLOURS[point.kind]
    for curve in point.curves:
        axes.plot(*zip(*curve, strict=True), color=colour, linewidth=1.0, alpha=0.7)
    # A method's student and ensemble cost the same; if they are equally good, the larger mark shows behind the other.
    behind = point.kind == "ensemble"
    axes.errorbar(
        point.cost,
        point.score,
        yerr=point.spread,
        color=colour,
        marker=marker,
        markersize=9 if behind else 6,
        markeredgecolor="black",
        markeredgewidth=0.6,
        linestyle="none",
        elinewidth=1.2,
        capsize=3,
        zorder=2.1 if behind else 2.2,
        label=_label(point, metric),
    )


def _scale(axes: Axes, points: Sequence[Point], least: float) -> None:
    """Make the horizontal axis logarithmic; its tick at ``least`` means that or less, and lower ticks have no label."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    costs = [cost for point in points for cost in (point.cost, *(cost for curve in point.curves for cost, _ in curve))]
    first, last = min(costs) / 2.5, 2.5 * max(costs)
    axes.set_xscale("log")
    axes.set_xlim(first, last)
    # Over less than two decades the powers of ten alone would be too few ticks.
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if last / first > 100.0 else (1.0, 2.0, 5.0), numticks=12))

    def number(cost: float, _: object) -> str:
        if cost < 0.99 * least:
            return ""
        return f"≤ {cost:g}" if cost < 1.01 * least else f"{cost:g}"

    axes.xaxis.set_major_formatter(FuncFormatter(number))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="both", color="#e3e7eb", linewidth=0.6)
    axes.set_axisbelow(True)


KIB = 2**10


@dataclass(frozen=True)
class Cost:
    """The communication cost of a result.

    Attributes:
        traffic: The bytes of its clients.
        counted: How the uploads are counted. ``"messages"``: by the run's own messages. ``"source"``: by those of
            another run, which holds the uploads. ``"sizes"``: by their files, if an upload came without a message.
    """

    traffic: Traffic
    counted: Literal["messages", "source", "sizes"] = "messages"

    def of_uploads(self) -> float:
        """Return the MiB per client, up and down, of the upload phase alone; 0 without one."""
        moved = self.traffic.phases.get(UPLOAD_PHASE)
        return Traffic({UPLOAD_PHASE: moved}).mib_per_client if moved is not None else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the cost for result.json; means are over all clients of the run, so that phases add up."""
        clients = len(self.traffic.clients)
        return {
            "counted": self.counted,
            "clients": clients,
            "phases": {name: _amounts(moved, clients) for name, moved in self.traffic.phases.items()},
            "total": _amounts(Moved(self.traffic.up, self.traffic.down), clients),
        }


def _amounts(moved: Moved, clients: int) -> dict[str, float]:
    """Return MiB in total and per client, rounded to about a byte, because a request has a few hundred bytes."""
    up, down = sum(moved.up.values()) / MIB, sum(moved.down.values()) / MIB
    return {
        "mib_up": round(up, 6),
        "mib_down": round(down, 6),
        "mib_up_per_client": round(up / max(1, clients), 6),
        "mib_down_per_client": round(down / max(1, clients), 6),
    }


def rounds_in(folder: RunFolder) -> list[RoundFolder]:
    """Return the rounds that a run folder holds."""
    return [folder.round(n) for n in range(1, 2 + len(list(folder.path.glob("round-*"))))]


def moved_in(folder: RunFolder) -> Traffic:
    """Return the traffic of a run's own messages, over all rounds and restarts; a replay has none.

    Raises:
        StoreError: An account is damaged.
    """
    return Traffic.sum_of(Traffic.read(each.path / TRAFFIC_FILE) for each in rounds_in(folder))


def cost_of(folder: RunFolder) -> Cost | None:
    """Return the cost of a run's result, that of another run's uploads included; None where that run is missing.

    Raises:
        StoreError: The run's own account is damaged.
    """
    moved, source = moved_in(folder), folder.info.get("replay-of")
    if UPLOAD_PHASE in moved.phases:
        return Cost(moved)
    uploads = cost_of_uploads(folder.path if source is None else Path(source), replayed=source is not None)
    if uploads is None:  # a replay whose source is missing, or a run in rounds, which has no uploads
        return Cost(moved) if moved.phases else None
    return Cost(Traffic.sum_of([uploads.traffic, moved]), uploads.counted)


def cost_of_uploads(path: Path, *, replayed: bool = True, without: Collection[str] = ()) -> Cost | None:
    """Return the cost of collecting a run folder's uploads, those of earlier rounds included.

    Args:
        replayed: Whether another run uses the uploads.

    Returns:
        None if the folder is missing or holds no uploads.
    """
    try:
        with RunFolder.open(path, write=False) as run:
            others, left_out = run.info.get("uploads-of"), {*without, *run.info.get("forgotten", ())}
            if others and (found := cost_of_uploads(Path(others), without=left_out)) is not None:
                return found
            total, sized = _counted(rounds_in(run)[: max(1, last_finished_round(run))], left_out)
    except StoreError:
        return None
    return Cost(total, "sizes" if sized else "source" if replayed else "messages") if total.phases else None


def _counted(rounds: Sequence[RoundFolder], left_out: Collection[str]) -> tuple[Traffic, bool]:
    """Return the bytes of uploads, and whether one came without a message, so that its file size counts."""
    total, sized = Traffic(), False
    for each in rounds:
        moved = Traffic.read(each.path / TRAFFIC_FILE).phases.get(UPLOAD_PHASE, Moved())
        for upload in (record for record in each.records() if record.client not in left_out):
            sized |= upload.client not in moved.up
            up, down = moved.up.get(upload.client, upload.bytes), moved.down.get(upload.client, 0)
            total.add(UPLOAD_PHASE, upload.client, up=up, down=down)
    return total, sized


def is_own_row(name: str, method: Choice) -> bool:
    """Whether a row of a result table is the method's own, by its name; the last row always is."""
    return name in (method.title, ensemble_row(method)) or name.startswith(f"{method.title} (")


def ensemble_row(method: Choice) -> str:
    """Return the name of the row of a method's ensemble beside that of its student."""
    return f"{method.title} ensemble"


def tested_rounds(metrics: Sequence[Mapping[str, Any]], metric: str) -> list[Mapping[str, Any]]:
    """Return the rows of metrics.jsonl of rounds with a score that the server has measured.

    Without the server's accuracy a score is a number of the clients' with the same name.
    """
    return [row for row in metrics if row.get("accuracy") is not None and row.get(metric) is not None]


def curve_of(metrics: Sequence[Mapping[str, Any]], cost: Mapping[str, Any], metric: str = "accuracy") -> Curve:
    """Return MiB per client and headline score of the rounds whose rows have both.

    Args:
        metrics: The rows of metrics.jsonl; their MiB count the run's own messages.
        cost: The cost in result.json; the cost of uploads from another run is added.
        metric: The headline score.
    """
    rounds = [row for row in tested_rounds(metrics, metric) if row.get("mib_per_client")]
    uploads = cost["phases"].get(UPLOAD_PHASE) if cost["counted"] != "messages" else None
    before = uploads["mib_up_per_client"] + uploads["mib_down_per_client"] if uploads else 0.0
    return tuple((before + float(row["mib_per_client"]), float(row[metric])) for row in rounds)


def points_of(
    method: Choice, rows: Sequence[Row], metrics: Sequence[Mapping[str, Any]], cost: Cost, metric: str = "accuracy"
) -> list[Point]:
    """Return the rows of a result table whose cost is known; a client's own model costs nothing.

    The method's own rows cost the whole traffic of the run, the others the cost of the uploads.
    """
    uploads, whole, curve = cost.of_uploads(), cost.traffic.mib_per_client, curve_of(metrics, cost.as_json(), metric)
    own = [row for row in rows if row is rows[-1] or is_own_row(row.name.removesuffix(EXACT), method)]
    # The rounds with the clients train the ensemble if the method has one, else the student.
    trained = next((row for row in own if row.kind == "ensemble" and not row.name.endswith(EXACT)), rows[-1])
    points = []
    for row in (row for row in rows if row.kind != "client"):
        mib = whole if row in own else uploads
        if mib > 0.0 and (score := headline(row.as_json(), metric)) is not None:
            curves = (curve,) if curve and row is trained else ()
            points.append(Point(row.name, row.kind, mib, score, curves=curves))
    return points


def moved_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the traffic per client in fitting units: ``240.4 KiB up, 150 B down per client``.

    The first line is the whole traffic of the run; several phases have a line each. A replay's line has the cost of its
    uploads too.
    """
    cost, line = result.get("communication"), f"{_both(result)} per client"
    if cost is None or (cost["counted"] == "messages" and len(cost["phases"]) < 2):
        return [line]
    if len(cost["phases"]) < 2:
        return [f"{line}; the uploads cost {_both(cost['total'])}"]
    earlier = {UPLOAD_PHASE: ", in another run"} if cost["counted"] != "messages" else {}
    return [line, *(f"{name}: {_both(moved)}{earlier.get(name, '')}" for name, moved in cost["phases"].items())]


def _both(amounts: Mapping[str, float]) -> str:
    return f"{size_text(amounts['mib_up_per_client'])} up, {size_text(amounts['mib_down_per_client'])} down"


def size_text(mib: float) -> str:
    """Return MiB in a fitting unit: ``175.1 KiB``."""
    amount = mib * MIB
    if amount >= MIB:
        return f"{mib:.1f} MiB"
    return f"{amount / KIB:.1f} KiB" if amount >= KIB else f"{amount:.0f} B"
