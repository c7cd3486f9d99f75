"""Measure how much copying its checkpoints to a bucket slows a stage down: by less than a twentieth of its time.

    python benchmarks/checkpoint_upload.py [--repeats 5] [--seconds 20] [--every 4] [--megabytes 12]

A stand-in of a stage (matrix products on one thread, and a checkpoint of the given size every few seconds) runs in a
process of its own, as a stage does; the process that watches it copies, as an attempt does, to the S3 server of ``moto`` in
a third process. Both sides of a pair do the same work, one after the other, in alternating order; what counts is the median
of the ratios. The server's own work on the same cores is in the cost, so a real one costs less.
"""

import argparse
import contextlib
import multiprocessing
import os
import secrets
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

NAMES = ("checkpoints", "journal.jsonl")


def main() -> None:
    """Print the seconds of each pair, and the median of the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of work, as long as nothing is copied")
    parser.add_argument("--every", type=float, default=4.0, help="seconds of work between checkpoints")
    parser.add_argument("--megabytes", type=float, default=12.0, help="of one checkpoint")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    address = make_bucket(ours.recv())
    products = calibrated(options.seconds)
    ratios = []
    used: dict[bool, list[float]] = {False: [], True: []}
    for number in range(options.repeats):
        pair = {}
        for copied in (False, True) if number % 2 == 0 else (True, False):
            began = time.process_time()
            pair[copied] = seconds_of_stage(address, options, products, copied=copied)
            used[copied].append(time.process_time() - began)
        ratios.append(pair[True] / pair[False])
        print(
            f"not copied {pair[False]:6.2f} s   copied {pair[True]:6.2f} s   ratio {ratios[-1]:.3f}",
            flush=True,
        )
    print(f"median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    watcher = {copied: statistics.median(seconds) for copied, seconds in used.items()}
    print(
        f"CPU of the watching process: {watcher[False]:.2f} s without the copy, {watcher[True]:.2f} s with it"
    )
    ours.send(None)
    server.join()


def seconds_of_stage(address: str, options: argparse.Namespace, products: int, *, copied: bool) -> float:
    """Return the wall time of the stage, without the copy that goes on after its end."""
    from vantage.storage.bucket import open_bucket
    from vantage.storage.object_storage import ObjectStorage

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        storage = ObjectStorage(open_bucket(address), Path(folder))
        key = secrets.token_hex(32)
        scratch = storage.scratch_folder(key)
        receive, send = context.Pipe(duplex=False)
        checkpoints = round(options.seconds / options.every)
        stage = context.Process(
            target=run_stage, args=(scratch, products, checkpoints, options.megabytes, send)
        )
        with storage.keep_copy(key, NAMES) if copied else contextlib.nullcontext():
            stage.start()
            seconds = float(receive.recv())
            stage.join()
        storage.discard_scratch(key)
    return seconds


def run_stage(scratch: Path, products: int, checkpoints: int, megabytes: float, send: Connection) -> None:
    """Compute ``products`` matrix products, with checkpoints of new tensors in between, as a stage does."""
    import torch

    from vantage.tasks.training.checkpoints import save

    torch.set_num_threads(1)
    weights = torch.randn(int(megabytes * 1e6 / 4))
    work(products // 50)  # warm up
    began = time.perf_counter()
    for step in range(1, checkpoints + 1):
        work(products // checkpoints)
        weights += 1.0
        with (scratch / "journal.jsonl").open("a") as file:
            file.write(f'{{"step": {step}}}\n' * 100)
        save(scratch / "checkpoints", step=step, tensors={"policy/weights": weights}, state={"step": step})
    send.send(time.perf_counter() - began)


def work(products: int) -> None:
    """Compute this number of matrix products."""
    import torch

    matrix = torch.randn(256, 256) / 16
    for _ in range(products):
        matrix = torch.tanh(matrix @ matrix)


def calibrated(seconds: float) -> int:
    """Return how many products take ``seconds`` on one thread."""
    import torch

    torch.set_num_threads(1)
    work(200)
    began = time.perf_counter()
    work(2000)
    return int(seconds / (time.perf_counter() - began) * 2000)


def serve(connection: Connection) -> None:
    """Serve as an S3 server until something is received."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    connection.send(f"http://{host}:{port}")
    connection.recv()
    server.stop()


def make_bucket(endpoint: str) -> str:
    """Return the address of a new bucket; the environment names its server."""
    import boto3

    os.environ.update(
        AWS_ENDPOINT_URL=endpoint,
        AWS_ACCESS_KEY_ID="key",
        AWS_SECRET_ACCESS_KEY="secret",
        AWS_REGION="us-east-1",
        AWS_ALLOW_HTTP="true",
    )
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="checkpoints")
    return "s3://checkpoints/workspace"


if __name__ == "__main__":
    main()
