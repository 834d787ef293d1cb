"""Tests the hooks on library functions: where they apply, and that they are removed completely."""

from __future__ import annotations

import asyncio
import re
import threading
import types
import warnings

import pytest

import loadstone
from loadstone._adapters import patch
from loadstone._adapters.patch import Hook, Hooks, active, hooked, suspended, wrap_if_active
from loadstone._adapters.sites import LIBRARIES


def test_a_patch_that_is_never_used_warns() -> None:
    with pytest.warns(UserWarning, match=r"patch\('accelerate'\) had no effect: use it in a with"):
        loadstone.patch("accelerate")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with loadstone.patch("accelerate"):
            pass
        loadstone.patch("accelerate").start().stop()


class Parent:
    @classmethod
    def make(cls, value):
        return "parent", cls, value

    def inherited(self):
        return "inherited"


class Owner(Parent):
    """A stand-in for a library's class, with an attribute of each kind."""

    attribute = "text"

    @classmethod
    def make(cls, value):
        return "own", cls, value

    @staticmethod
    def static(value):
        return "own", value

    def method(self, value):
        return "own", value


MODULE = types.ModuleType("library")
MODULE.function = lambda value: ("own", value)


def replaced(original, *args, **kwargs):
    return "loadstone", original(*args, **kwargs)


def hooks(library="accelerate"):
    names = [(Owner, "make"), (Owner, "static"), (Owner, "method"), (Owner, "inherited")]
    return Hooks(
        [
            Hook(owner, name, wrap_if_active(library, replaced))
            for owner, name in [*names, (MODULE, "function")]
        ],
        library,
    )


def state():
    """Return all attributes of the patched owners, in order."""
    return [list(vars(owner).items()) for owner in (Owner, Parent, MODULE)]


def assert_same_objects(before):
    for owner_before, owner_now in zip(before, state(), strict=True):
        assert [name for name, _ in owner_before] == [name for name, _ in owner_now]
        for (name, was), (_, now) in zip(owner_before, owner_now, strict=True):
            assert was is now, name


@pytest.fixture(autouse=True)
def untouched():
    before = state()
    yield before
    assert_same_objects(before)
    assert not active("accelerate") and not active("transformers")
    assert not patch._patched


@pytest.fixture
def library(monkeypatch):
    """Use hooks on the stand-ins for `accelerate` and `transformers`."""
    made = {name: hooks(name) for name in ("accelerate", "transformers")}
    monkeypatch.setattr(patch, "_library_hooks", made.__getitem__)
    return made


def all_calls():
    return [
        Owner.make(1), Owner.static(1), Owner().method(1), Owner().inherited(), MODULE.function(1)
    ]  # fmt: skip


def patched():
    """Return true if all calls are hooked, and false if none is; fail if only some are."""
    ours = {call[0] == "loadstone" for call in all_calls()}
    assert len(ours) == 1
    return ours.pop()


def test_each_kind_of_attribute_is_wrapped_and_put_back():
    plain = all_calls()
    with hooked(hooks()):
        assert isinstance(vars(Owner)["make"], classmethod)
        assert isinstance(vars(Owner)["static"], staticmethod)
        assert all_calls() == [("loadstone", call) for call in plain]
        assert Owner.make(1)[1][1] is Owner
        assert Parent.make(1)[0] == "parent"
    assert "inherited" not in vars(Owner)
    assert all_calls() == plain


def test_the_comparison_would_see_a_wrapper_that_stays(untouched):
    held = hooks()
    held.acquire()
    with pytest.raises(AssertionError):
        assert_same_objects(untouched)
    held.release()
    before = vars(Owner)["make"]
    Owner.make = classmethod(before.__func__)  # an equal but different object
    with pytest.raises(AssertionError):
        assert_same_objects(untouched)
    Owner.make = before


def test_installed_hooks_without_a_user_in_this_context_do_nothing():
    held = hooks()
    held.acquire()
    assert not patched()
    held.release()


def test_the_last_user_puts_everything_back(untouched):
    held = hooks()
    held.acquire()
    held.acquire()
    held.release()
    with pytest.raises(AssertionError):
        assert_same_objects(untouched)
    held.release()
    assert_same_objects(untouched)
    with pytest.raises(RuntimeError, match="more often"):
        held.release()


def test_all_or_none_are_installed():
    def broken(original):
        raise OSError("no")

    some = Hooks([*hooks(), Hook(Owner, "attribute", broken)])
    with pytest.raises(OSError, match="no"):
        some.acquire()
    missing = Hooks([*hooks(), Hook(Owner, "no_such_name", wrap_if_active("accelerate", replaced))])
    with pytest.raises(AttributeError):
        missing.acquire()


@pytest.mark.parametrize("first_to_go", [0, 1])
def test_two_sets_of_hooks_on_the_same_attributes_go_in_any_order(first_to_go):
    sets = [hooks("accelerate"), hooks("transformers")]
    for each in sets:
        each.acquire()
    sets[first_to_go].release()
    left = ("transformers", "accelerate")[first_to_go]
    for name in ("transformers", "accelerate"):
        entry = patch._Entry([name], on=True)
        patch._begin(entry)
        assert patched() is (name == left)
        patch._end(entry)
    sets[1 - first_to_go].release()


def test_what_a_third_party_put_on_top_stays():
    held = hooks()
    before = MODULE.function
    held.acquire()
    ours = MODULE.function
    theirs = MODULE.function = lambda value: ours(value)
    held.release()
    assert MODULE.function is theirs
    assert MODULE.function(1) == ("own", 1)
    MODULE.function = before


def test_patch_acts_inside_and_ends(library):
    assert not patched()
    with loadstone.patch("accelerate"):
        assert patched()
    assert not patched()


def test_it_ends_after_an_exception(library):
    with pytest.raises(ZeroDivisionError), loadstone.patch("accelerate", "transformers"):
        raise ZeroDivisionError
    assert not patched()
    with pytest.raises(ZeroDivisionError), hooked(hooks()):
        raise ZeroDivisionError


def test_nested_the_inner_one_ends_nothing(library):
    outer = loadstone.patch("accelerate")
    with outer:
        with loadstone.patch("accelerate"), outer:
            assert patched()
        assert patched()
        with pytest.raises(KeyError), outer:
            raise KeyError
        assert patched()


def test_suspended_calls_are_the_librarys_own(library):
    healing = loadstone.patch("accelerate").start()
    with loadstone.patch("accelerate"), suspended("accelerate"):
        assert not patched()
        with loadstone.patch("accelerate"):
            assert patched()
    with suspended("accelerate"):
        assert not patched()
    assert patched()
    healing.stop()


def in_thread(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def test_another_thread_is_not_concerned(library):
    with loadstone.patch("accelerate"):
        assert patched()
        assert in_thread(patched) is False
        assert patched()


def test_start_concerns_every_thread_until_stop(library):
    first = loadstone.patch("accelerate").start()
    second = loadstone.patch("accelerate").start()
    assert first.start() is first
    assert patched() and in_thread(patched)
    first.stop()
    assert patched() and in_thread(patched)
    first.stop()
    assert patched()
    second.stop()
    assert not patched()
    second.stop()
    first.start()
    assert patched()
    first.stop()


def test_threads_enter_and_leave_at_the_same_time(library):
    """Half of the threads enter the patch; all threads share one patch object."""
    shared = loadstone.patch("accelerate")
    wrong = []
    barrier = threading.Barrier(6)

    def work(inside):
        barrier.wait()
        for _ in range(300):
            if inside:
                with shared:
                    wrong.extend([1] if not patched() else [])
            wrong.extend([2] if patched() else [])

    threads = [threading.Thread(target=work, args=(number % 2 == 0,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not shared._open


def test_a_task_that_outlives_the_block_is_not_patched_any_more(library):
    async def later(opened, closed):
        opened.set()
        before = patched()
        await closed.wait()
        return before, patched()

    async def main():
        opened, closed = asyncio.Event(), asyncio.Event()
        with loadstone.patch("accelerate"):
            task = asyncio.create_task(later(opened, closed))
            await opened.wait()
        closed.set()
        return await task

    assert asyncio.run(main()) == (True, False)


def test_left_in_another_thread_than_entered(library):
    healing = loadstone.patch("accelerate")
    healing.__enter__()
    in_thread(lambda: healing.__exit__(None, None, None))
    assert not patched()


def test_as_a_decorator(library):
    assert loadstone.patch("accelerate")(patched)() is True
    assert not patched()


@pytest.mark.parametrize("names", [("tensorflow",), ("accelerate", "tensorflow"), ()])
def test_what_cannot_be_patched_is_refused_by_name(names):
    with pytest.raises(loadstone.Error) as caught:
        loadstone.patch(*names)
    assert caught.value.code == "plan.options"
    assert "transformers, diffusers, accelerate" in str(caught.value)
    assert not names or names[-1] in str(caught.value)


def test_a_library_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(patch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(loadstone.Error, match="not installed"):
        loadstone.patch("accelerate")


def test_the_docstring_names_every_library() -> None:
    assert loadstone.patch.__doc__ is not None
    assert tuple(re.findall(r'``"(\w+)"``', loadstone.patch.__doc__)) == LIBRARIES
