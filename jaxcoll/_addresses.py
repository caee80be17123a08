"""Addresses, as HOST:PORT, of JAX's coordination service."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved(address: str | None) -> Iterator[str]:
    """Keeps everyone but the service from an address, which it yields.

    XLA ends the process where it can't bind, and shares the port with another service where it can
    because of SO_REUSEPORT. So the port is bound here first, alone, and then opened to the service.
    """
    host, port = split_address(address) if address else ("127.0.0.1", 0)
    try:
        [(family, kind, _, _, name), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        holder = socket.socket(family, kind)
    except OSError as error:
        raise ValueError(f"--coordinator: {host!r} is not the name of a host: {error}.") from error
    with holder:
        if address:  # whatever is left of the connections of an earlier job
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(name)
        except OSError as error:
            raise ValueError(
                f"--coordinator: expected a free port of this host, the one with --host-id 0, got "
                f"{address}: {error.strerror}."
            ) from error
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield address or f"{host}:{holder.getsockname()[1]}"


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port. Raises ValueError where it has none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"--coordinator: expected HOST:PORT, got {address!r}.")
    return host.removeprefix("[").removesuffix("]"), int(port)
