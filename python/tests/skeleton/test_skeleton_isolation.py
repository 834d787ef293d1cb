"""Tests that building a skeleton affects only its own thread and context, and no torch setting."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from loadstone._skeleton.skeleton import skeleton, skeleton_record

LARGE = (1 << 20,)


def build(make):
    with skeleton():
        return make()


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b", torch.ones(LARGE))


def torch_state():
    module = nn.modules.module
    return (
        torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
        torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(),
        dict(module._global_parameter_registration_hooks),
        dict(module._global_buffer_registration_hooks),
        dict(module._global_module_registration_hooks),
        nn.Module.register_parameter, nn.Module.register_buffer, nn.Module.__setattr__,
        nn.Module.__init__, nn.Parameter.__new__, torch.empty, torch.randn, nn.init.normal_,
    )  # fmt: skip


def test_no_state_of_torch_is_left_changed():
    before = torch_state()
    build(lambda: nn.Linear(2, 2))
    assert torch_state() == before
    with pytest.raises(ZeroDivisionError), skeleton():
        1 / 0  # noqa: B018
    assert torch_state() == before
    context = skeleton()
    with context:
        with context, skeleton():
            inner = nn.Linear(2, 2)
        assert torch_state() != before  # control
        outer = nn.Linear(2, 2)
    assert torch_state() == before
    assert inner.weight.is_meta and outer.weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_an_exception_leaves_what_was_finished_usable():
    held = []
    with pytest.raises(ValueError, match="late"), skeleton():
        held.append(Large())
        raise ValueError("late")
    assert torch.equal(held[0].b, torch.ones(LARGE))


def test_as_a_decorator():
    @skeleton()
    def make():
        return nn.Linear(2, 2)

    assert make().weight.is_meta and make().weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_another_thread_gets_real_parameters():
    barrier = threading.Barrier(2)
    made = {}

    class Waiting(nn.Module):
        """A module whose construction in two threads overlaps, because both wait at barriers."""

        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            barrier.wait()
            self.b = nn.Linear(1024, 1024)
            self.register_buffer("c", torch.ones(LARGE))
            barrier.wait()
            self.d = nn.Linear(4, 4)
            barrier.wait()

    def other():
        made["other"] = Waiting()

    thread = threading.Thread(target=other)
    with skeleton():
        thread.start()
        made["mine"] = Waiting()
        thread.join()
    assert all(parameter.is_meta for parameter in made["mine"].parameters())
    assert not any(parameter.is_meta for parameter in made["other"].parameters())
    assert made["other"].b.weight.abs().sum() > 0  # also initialised
    assert skeleton_record(made["other"]).findings == []


def test_threads_that_come_and_go_do_not_disturb_a_registration():
    """A global hook would raise if it were removed while another thread iterates over the hooks."""
    failures, stop = [], threading.Event()

    def construct():
        try:
            while not stop.is_set():
                assert not nn.Linear(2, 2).weight.is_meta
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=construct) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        assert build(lambda: nn.Linear(2, 2)).weight.is_meta
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []


def test_two_coroutines_interleave():
    async def first(inside, leave):
        with skeleton():
            a = nn.Linear(2, 2)
            inside.set()
            await leave.wait()
            b = nn.Linear(2, 2)
        return a, b

    async def run():
        inside, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(first(inside, leave))
        await inside.wait()
        plain = nn.Linear(2, 2)
        with skeleton():
            mine = nn.Linear(2, 2)
            leave.set()
            a, b = await task
            later = nn.Linear(2, 2)
        return plain, [mine, later, a, b]

    before = torch_state()
    plain, on_meta = asyncio.run(run())
    assert torch_state() == before
    assert not plain.weight.is_meta
    assert all(linear.weight.is_meta for linear in on_meta)


def test_nothing_is_kept_of_a_model_that_is_gone():
    from loadstone._skeleton.finish import facts

    class Derived(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.row = self.linear.weight[0]
            self.drawn = torch.randn(3)
            self.blank = torch.empty(3)

    def kept():
        gc.collect()
        facts.purge()
        return [len(facts.by_storage), len(facts.builds)]

    before = kept()
    model = build(Derived)
    assert [now - then for now, then in zip(kept(), before, strict=True)] == [3, 2]
    del model
    assert kept() == before


ELSEWHERE: list[torch.Tensor] = []  # tensors that no module or local variable refers to


def test_tensors_at_the_address_of_a_dropped_parameter_become_real():
    def construct():
        for _ in range(50):
            nn.Linear(2, 2)
            ELSEWHERE.append(torch.ones(LARGE))

    build(construct)
    assert all(torch.equal(each, torch.ones(LARGE)) for each in ELSEWHERE)
    ELSEWHERE.clear()


def test_tuples_in_other_threads_are_left_alone():
    """``gc.get_objects`` can return an unfinished tuple, whose construction then fails."""

    def failures(disturb):
        stop, errors = threading.Event(), []

        def make_tuples():
            while not stop.is_set():
                try:
                    tuple(number for number in range(2000))
                except SystemError as error:
                    errors.append(error)

        thread = threading.Thread(target=make_tuples)
        thread.start()
        for _ in range(40):
            disturb()
        stop.set()
        thread.join()
        return errors

    held = []

    def control():
        held[:] = gc.get_objects()
        time.sleep(0.01)

    assert failures(control)
    assert not failures(lambda: build(lambda: nn.Linear(2, 2)))


def test_the_collector_is_asked_for_nothing(monkeypatch):
    def refuse(*_):
        raise AssertionError("the cost of this grows with the process")

    for name in ("collect", "get_objects", "get_referrers", "get_referents", "freeze", "disable"):
        monkeypatch.setattr(gc, name, refuse)
    made = build(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4), 2))
    assert all(parameter.is_meta for parameter in made.parameters())
    made = build(lambda: [Large() for _ in range(16)])  # 64 MiB
    assert all(torch.equal(each.b, torch.ones(LARGE)) for each in made)


def test_tensors_in_dead_cycles_are_freed_by_the_collector():
    """Until the collector runs, loadstone must treat tensors in dead cycles as in use."""
    alive = []

    def construct():
        dropped = [torch.ones(LARGE)]
        alive.append(weakref.ref(dropped[0], lambda _: alive.clear()))
        dropped.append(dropped)
        return Large()

    gc.disable()
    try:
        made = build(construct)
        assert torch.equal(alive[0](), torch.ones(LARGE))
    finally:
        gc.enable()
    gc.collect()
    assert not alive
    assert torch.equal(made.b, torch.ones(LARGE))
