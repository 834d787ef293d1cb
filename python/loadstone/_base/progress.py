"""Progress bars and callbacks of loads and conversions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from loadstone._base.arguments import wrong_kind

ProgressCallback = Callable[[int, int], object]
Progress = bool | ProgressCallback


@contextlib.contextmanager
def show_progress(progress: Progress, title: str) -> Iterator[ProgressCallback | None]:
    """Yield a progress bar for ``True``, or the caller's callback (bytes done, total bytes)."""
    if progress is False:
        yield None
    elif progress is not True:
        if progress is not None and not callable(progress):
            raise wrong_kind("progress", progress, "True, False or a function")
        yield progress
    else:
        from tqdm.auto import tqdm

        with tqdm(total=0, unit="B", unit_scale=True, unit_divisor=1000, desc=title) as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield show
