"""Tables and the plot of a results file."""

import statistics
from pathlib import Path
from typing import Any

KIB, MIB = 1 << 10, 1 << 20


def size_text(size: int) -> str:
    if size >= MIB:
        return f"{size // MIB} MiB"
    return f"{size // KIB} KiB" if size >= KIB else f"{size} B"


def markdown(results: dict[str, Any]) -> str:
    """Returns all tables; times are medians in us, ratios medians of paired rounds."""
    head = results["environment"]
    lines = [
        "# One process: jaxcoll against jax.lax",
        "",
        f"`{results['command']}`, {head['date']}, {head['cores']} cores of {head['cpu']}, "
        f"jax {head['jax']}, Python {head['python']}.",
        "",
        "Times are medians in microseconds; ratios (lax / ours, above 1 ours is faster) are "
        "medians of rounds in which all variants ran in turn. *chained* is the extra time for each "
        "call of a longer chain in one program, *single* a whole program with one call.",
    ]
    for devices in sorted({row["devices"] for row in results["collectives"]}):
        lines += ["", f"## Collectives, {devices} devices", ""]
        lines += [
            "| op | bytes per rank | how | native | auto | lax | lax/native | lax/auto | wrong |"
        ]
        lines += ["|---|--:|---|--:|--:|--:|--:|--:|--:|"]
        for row in results["collectives"]:
            if row["devices"] != devices:
                continue
            if "left_out" in row:
                lines.append(f"| {row['op']} | {size_text(row['bytes'])} | left out: memory ||||||")
                continue
            lines.append(
                f"| {row['op']} | {size_text(row['bytes'])} | {row['how']} | {row['native_us']} | "
                f"{row['auto_us']} | {row['lax_us']} | {row['lax_over_native']} | "
                f"{row['lax_over_auto']} | {row['wrong']} |"
            )
    lines += ["", "## Geometric means of lax/native, chained", "", "| op | devices | ratio |"]
    lines += ["|---|--:|--:|"]
    for (op, devices), ratio in geometric_means(results).items():
        lines.append(f"| {op} | {devices} | {ratio:.2f} |")
    lines += ["", "## Mixed with XLA's collectives and compute", ""]
    lines += [
        "| program | devices | mixed us | native us | lax us | lax/mixed | lax/native | wrong |"
    ]
    lines += ["|---|--:|--:|--:|--:|--:|--:|--:|"]
    for row in results["mixed"]:
        lines.append(
            f"| {row['program']} | {row['devices']} | {row['mixed_us']} | {row['native_us']} | "
            f"{row['lax_us']} | {row['lax_over_mixed']} | {row['lax_over_native']} | "
            f"{row['wrong']} |"
        )
    lines += ["", "## Gradient tree (mean, donated), milliseconds", ""]
    lines += [
        "| devices | leaves | MB | nothing | native | auto | lax | own time native | "
        "own time lax | "
        "lax/native, own | native own / memory bound | wrong |"
    ]
    lines += ["|--:" * 12 + "|"]
    for row in results["gradient_tree"]:
        lines.append(
            f"| {row['devices']} | {row['leaves']} | {row['megabytes_per_device']} | "
            f"{row['nothing_ms']} | {row['native_ms']} | {row['auto_ms']} | {row['lax_ms']} | "
            f"{row['native_own_ms']} | {row['lax_own_ms']} | {row['lax_over_native_own']} | "
            f"{row['native_own_over_memory_bound']} | {row['wrong']} |"
        )
    return "\n".join(lines) + "\n"


def geometric_means(results: dict[str, Any]) -> dict[tuple[str, int], float]:
    ratios: dict[tuple[str, int], list[float]] = {}
    for row in results["collectives"]:
        if row.get("how") == "chained":
            ratios.setdefault((row["op"], row["devices"]), []).append(row["lax_over_native"])
    return {key: statistics.geometric_mean(values) for key, values in ratios.items()}


def plot(results: dict[str, Any], path: Path) -> None:
    """Draws time per call over size, ours beside lax's, a panel for each op and device count."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in results["collectives"] if row.get("how") == "chained"]
    ops = list(dict.fromkeys(row["op"] for row in rows))
    counts = sorted({row["devices"] for row in rows})
    figure, panels = plt.subplots(
        len(counts), len(ops), figsize=(3.1 * len(ops), 2.6 * len(counts)), sharex=True, sharey=True
    )
    for i, devices in enumerate(counts):
        for j, op in enumerate(ops):
            panel = panels[i][j] if len(counts) > 1 else panels[j]
            points = [row for row in rows if row["op"] == op and row["devices"] == devices]
            for variant, color in (("lax", "#b0563b"), ("native", "#1f6fb2")):
                panel.plot(
                    [row["bytes"] for row in points],
                    [row[f"{variant}_us"] for row in points],
                    marker="o",
                    markersize=3,
                    color=color,
                    label="jax.lax" if variant == "lax" else "jaxcoll",
                )
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.grid(alpha=0.3)
            panel.set_title(f"{op}, {devices} devices", fontsize=9)
            if i == len(counts) - 1:
                panel.set_xlabel("bytes per rank", fontsize=8)
                panel.set_xticks([256, 64 * KIB, 16 * MIB], ["256 B", "64 KiB", "16 MiB"])
            if j == 0:
                panel.set_ylabel("us per call", fontsize=8)
            panel.tick_params(labelsize=8)
    (panels[0][0] if len(counts) > 1 else panels[0]).legend(fontsize=8)
    head = results["environment"]
    figure.suptitle(
        f"Chained collectives in one process, {head['cores']} cores, f32, jax {head['jax']} "
        "(lower is better)",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)
