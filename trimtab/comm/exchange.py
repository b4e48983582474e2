# SPDX-License-Identifier: Apache-2.0
"""Code that talks to other ranks in several rounds, written straight down and never waiting.

An exchange is a generator: it computes, yields a collective that it has issued, and goes on when that has ended.

    def exchange():
        yield all_reduce(scores, async_op=True)
        choose()
        yield all_reduce(factors, async_op=True)
        unpack()

`run` resumes it by callbacks of the collectives' futures and returns a future of its result, as DDP wants it. With gloo
a callback runs on one of the backend's threads. With NCCL a future ends when its collective is enqueued, so all rounds
are issued at once, on a stream of their own: the device keeps their order, and the backward goes on beside. One stream
for all rounds also means that no tensor is freed on one stream while another still reads it.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

Exchange = Generator[dist.Work, None, None]


def run(exchange: Exchange, result: Tensor, previous: Future[Tensor] | None, stream: Any) -> Future[Tensor]:
    """Drive an exchange from one collective to the next by callbacks, and promise the result."""
    device = result.device
    done: Future[Tensor] = Future(devices=[] if stream is None else [device])

    def advance(before: Future[Any] | None) -> None:
        try:
            if before is not None:
                before.value()
            with torch.no_grad(), torch.autocast(device.type, enabled=False), beside(stream):
                work = next(exchange, None)
                if work is None:
                    done.set_result(result)
        except Exception as error:
            done.set_exception(error)  # pyright: ignore[reportArgumentType]
            return
        if work is not None:
            work.get_future().add_done_callback(advance)

    if previous is None:
        advance(None)
    else:
        with beside(stream):  # the gradients are ready here and now, and the turn may come on another thread
            pass
        previous.add_done_callback(advance)
    return done.then(lambda future: future.value())  # a future that failed for DDP too


@contextmanager
def beside(stream: Any) -> Generator[None, None, None]:
    """Compute in a stream, after all that the current one has been given so far."""
    if stream is None:
        yield
        return
    module = torch.get_device_module(stream.device)
    stream.wait_stream(module.current_stream(stream.device))
    with module.stream(stream):
        yield
