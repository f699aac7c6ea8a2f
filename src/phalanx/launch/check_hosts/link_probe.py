"""The program that both hosts of a pair run at one time: can each reach the other, how soon, how fast.

Each listens, and opens a connection to the other over which it measures: first one of them, then the other. Where many
are only to reach one, that one listens for all of them, and each of them takes the time of a round trip.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from typing import Any

MARK = "phalanx-check:"
_REACHING = 3.0  # seconds that the other may take to listen
_MOST = 6.0  # seconds for all
_TRIPS = 20
_SENDING, _TRIES, _TRYING = 0.1, 3, 1.5  # seconds of a try; tries; seconds after which none begins
_PIECE = 1 << 16
_TRIP, _BULK, _END, _DONE = b"t", b"b", b"e", b"d"


def main() -> None:
    """Answer the question, JSON on stdin, by one line on stdout."""
    question = QUESTION  # pyrefly: ignore  # noqa: F821  (put there by what reads this text)
    answer = listen(question) if "comers" in question else come(question) if "comes" in question else link(question)
    print("\n" + MARK + json.dumps(answer), flush=True)


def listen(question: dict[str, Any]) -> dict[str, Any]:
    """Answer as many as come, until all have, or it takes too long."""
    ended = time.monotonic() + _MOST + _REACHING
    answering = []
    with socket.socket() as listener, suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", question["port"]))
        listener.listen(question["comers"])
        while len(answering) < question["comers"] and time.monotonic() < ended:
            listener.settimeout(max(0.1, ended - time.monotonic()))
            peer, _ = listener.accept()
            answering.append(threading.Thread(target=_answer, args=(peer, threading.Event()), daemon=True))
            answering[-1].start()
    for thread in answering:
        thread.join(max(0.0, ended - time.monotonic()))
    return {}


def come(question: dict[str, Any]) -> dict[str, Any]:
    """The way to one that listens: the error, or seconds of a round trip."""
    try:
        with _reached(tuple(question["peer"]), _MOST) as peer:
            peer.settimeout(_REACHING)
            latency = _trip(peer)
            peer.sendall(_DONE)
            return {"error": "", "latency": latency}
    except OSError as error:
        return {"error": error.strerror or str(error)}


def link(question: dict[str, Any]) -> dict[str, Any]:
    """The way to the other: the error, or seconds of a round trip and bytes per second."""
    ended = time.monotonic() + _MOST
    other_done = threading.Event()
    with socket.socket() as listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", question["port"]))
            listener.listen()
        except OSError:  # which the other will say
            other_done.set()
        else:
            threading.Thread(target=_serve, args=(listener, other_done), daemon=True).start()
        told: dict[str, Any] = {"error": ""}
        try:
            with _reached(tuple(question["peer"]), _REACHING) as peer:
                if not question["first"]:
                    other_done.wait(_MOST / 3)
                told.update(latency=_trip(peer), bandwidth=_rate(peer))
                peer.sendall(_DONE)
        except OSError as error:
            told["error"] = error.strerror or str(error)
        other_done.wait(max(0.0, ended - time.monotonic()))
    return told


def _reached(where: Any, patience: float) -> socket.socket:
    until = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection(where, timeout=max(0.5, until - time.monotonic()))
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _trip(peer: socket.socket) -> float:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips = []
    for _ in range(_TRIPS):
        began = time.monotonic()
        peer.sendall(_TRIP)
        if not peer.recv(1):
            raise ConnectionResetError(104, "Connection reset by peer")
        trips.append(time.monotonic() - began)
    return min(trips)


def _rate(peer: socket.socket) -> float:
    """Bytes per second, of several tries the most: in one of them either process may have been held up."""
    peer.settimeout(_MOST / 2)
    # little may wait on the way, or a slow link takes seconds to hand it on
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _PIECE)
    began, best = time.monotonic(), 0.0
    for _ in range(_TRIES):
        best = max(best, _sent(peer))
        if time.monotonic() - began > _TRYING:  # a slow link
            break
    return best


def _sent(peer: socket.socket) -> float:
    """Bytes per second of one try, by what the other had received once all had arrived."""
    piece = _BULK + bytes(_PIECE - 1)
    sent, began = 0, time.monotonic()
    while time.monotonic() - began < _SENDING:
        peer.sendall(piece)
        sent += len(piece)
    peer.sendall(_END)
    peer.recv(1)
    return sent / (time.monotonic() - began)


def _serve(listener: socket.socket, done: threading.Event) -> None:
    try:
        peer, _ = listener.accept()
    except OSError:
        done.set()
    else:
        _answer(peer, done)


def _answer(peer: socket.socket, done: threading.Event) -> None:
    """Answer bytes that ask for a round trip, and take in the others, until the other end has done."""
    try:
        with peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                received = peer.recv(_PIECE)
                last = received[-1:]
                if last in (_TRIP, _END):
                    peer.sendall(last)
                elif last == _DONE or not received:
                    break
    except OSError:
        pass
    done.set()


if __name__ == "__main__":
    main()
