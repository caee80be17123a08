"""Handwritten digits for the examples: batches, the same training on one device, and a report."""

import pathlib
from typing import Any

import jax
import numpy as np
import optax

try:
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the digits need {error.name}, which is not installed: pip install 'jaxcoll[demo]'"
    ) from error

BATCH = 256
EPOCHS = 20


def load() -> tuple[list[tuple[np.ndarray, np.ndarray]], tuple[np.ndarray, np.ndarray]]:
    """Return training batches of images (256, 64) from 0 to 1 with labels, and 261 test images."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.data))
    x, y = (digits.data[order] / 16).astype(np.float32), digits.target[order]
    last = 6 * BATCH
    batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, last, BATCH)]
    return batches * EPOCHS, (x[last:], y[last:])


def train_alone(apply: Any, params: Any, optimizer: Any) -> list[float]:
    """Train on one device, with nothing of jaxcoll; return the loss of each step."""

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()

    @jax.jit
    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jax.device_put(jax.device_get(params), jax.devices()[0])
    opt_state, losses = optimizer.init(params), []
    for x, y in load()[0]:
        params, opt_state, loss = step(params, opt_state, x, y)
        losses.append(float(loss))
    return losses


def report(example: str, losses: list[float], alone: list[float], logits: Any) -> None:
    """Print both losses and the accuracy on the test images, and draw the loss curves."""
    for i in (0, 29, 59, len(losses) - 1):
        print(f"step {i + 1:3d}  loss {losses[i]:.3f}  (one device: {alone[i]:.3f})")
    accuracy = (np.argmax(logits, -1) == load()[1][1]).mean()
    print(f"test accuracy {accuracy:.2f}")
    path = pathlib.Path("out", pathlib.Path(example).stem + ".png")
    path.parent.mkdir(exist_ok=True)
    _draw(path, losses, alone)
    print(f"picture: {path}")


def _draw(path: pathlib.Path, losses: list[float], alone: list[float]) -> None:
    figure = Figure(figsize=(5, 3), dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.plot(alone, color="#c2410c", linewidth=4, alpha=0.35, label="one device")
    axes.plot(losses, color="#0f766e", linewidth=1.2, label="8 devices")
    axes.set(xlabel="step", ylabel="loss, nats", yscale="log", title=path.stem)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
