"""What every rank gets out of a round. The ranks are threads: processes that end are in test_lost_ranks.py."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import tierload
from tests.ranks.support import in_threads, joined
from tierload import errors
from tierload.errors import CorruptPage, RankFailed, RanksDisagree, StoreBusy, StoreIOError, TornSave
from tierload.ranks import Channel


def stores(folder: Path) -> dict[str, dist.Store]:
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return {
        "tcp": tcp,
        "file": dist.FileStore(str(folder / "store"), -1),
        "hash": dist.HashStore(),
        "prefix": dist.PrefixStore("job/1", tcp),
        "prefix of prefix of file": dist.PrefixStore("a", dist.PrefixStore("b", dist.FileStore(str(folder / "b"), -1))),
    }


@pytest.mark.parametrize("kind", ["tcp", "file", "hash", "prefix", "prefix of prefix of file"])
def test_all_get_what_rank_0_makes_of_all_parts(tmp_path: Path, kind: str) -> None:
    def body(channel: Channel) -> list[bytes]:
        answers = []
        for save in range(3):
            channel.begin()
            answers.append(channel.round("describe", b"%d of\n%d" % (save, channel.rank), joined))
            answers.append(channel.round("commit", bytes([0, 255, channel.rank]), joined))
        return answers

    found = in_threads(3, body, store=stores(tmp_path)[kind])
    expected = []
    for save in range(3):
        expected.append(b",".join(b"%d of\n%d" % (save, rank) for rank in range(3)))
        expected.append(b"\x00\xff\x00,\x00\xff\x01,\x00\xff\x02")
    assert found == [expected] * 3


def test_a_rank_alone_decides_for_itself() -> None:
    assert in_threads(1, lambda channel: channel.round("x", b"1", joined)) == [b"1"]


def test_what_rank_0_posts_is_read_before_and_after_rounds() -> None:
    def body(channel: Channel) -> list[bytes]:
        read = []
        for number in range(20):
            channel.begin()
            for post in range(2):
                if channel.rank == 0:
                    channel.post("digests", b"%d %d" % (number, post))
                else:
                    read.append(channel.read("digests"))
            channel.round("describe", b"", joined)
        return read

    assert in_threads(3, body)[1:] == [[b"%d %d" % (n, post) for n in range(20) for post in range(2)]] * 2


ERRORS = {
    "no space": StoreIOError(errno.ENOSPC, "No space left on device", "/store/seg/x"),
    "busy": StoreBusy("the store is held", holder='{"host": "a", "pid": 7, "command": "c", "since": "s"}'),
    "page": CorruptPage("page 3 is not what was written", key="w", page=3),
    "torn": TornSave("changed", keys=["a", "b"]),
    "disagree": RanksDisagree("the states differ", differences=["w: rank 1"]),
}


@pytest.mark.parametrize("failing", [0, 1, 3])
@pytest.mark.parametrize("what", ERRORS)
def test_an_error_on_one_rank_is_raised_on_all(failing: int, what: str) -> None:
    def body(channel: Channel) -> None:
        channel.round("prepare", ERRORS[what] if channel.rank == failing else b"", joined)

    found = in_threads(4, body)
    assert found[failing] is ERRORS[what]
    others = [error for rank, error in enumerate(found) if rank != failing]
    for error in others:
        assert type(error) is type(ERRORS[what])
        assert what == "disagree" or f"rank {failing} (" in str(error)
        assert attributes(error) == attributes(ERRORS[what])
        if isinstance(error, StoreIOError):
            assert (error.errno, error.filename) == (errno.ENOSPC, "/store/seg/x")
            assert "No space left on device" in str(error)
    assert len({str(error) for error in others}) == 1


def attributes(error: BaseException) -> dict[str, object]:
    return {key: value for key, value in vars(error).items() if not key.startswith("_")}


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_that_is_none_of_tierloads_is_named_and_not_imported(failing: int) -> None:
    class Odd(Exception):
        pass

    def body(channel: Channel) -> None:
        channel.round("prepare", Odd("so") if channel.rank == failing else b"", joined)

    found = in_threads(3, body)
    assert type(found[failing]) is Odd
    for error in found[:failing] + found[failing + 1 :]:
        assert type(error) is RankFailed
        assert f"rank {failing} (" in str(error)
        assert "Odd: so" in str(error)


def test_what_decide_raises_is_raised_on_all() -> None:
    mistake = tierload.StoreFenced("taken over")

    def refuse(parts: list[bytes]) -> bytes:
        raise mistake

    found = in_threads(3, lambda channel: channel.round("commit", b"", refuse))
    assert found[0] is mistake
    assert [type(error) for error in found] == [tierload.StoreFenced] * 3
    assert "rank 0 (" in str(found[2])


def test_nothing_is_decided_after_an_error() -> None:
    decided: list[object] = []

    def decide(parts: list[bytes]) -> bytes:
        decided.append(parts)
        return b""

    in_threads(3, lambda channel: channel.round("x", ValueError() if channel.rank == 1 else b"", decide))
    assert not decided


def test_the_first_of_two_errors_is_raised_and_the_later_is_noted() -> None:
    store = dist.HashStore()
    first, second = TornSave("first"), TornSave("second")

    def body(channel: Channel) -> None:
        if channel.rank == 2:
            channel.round("x", first, joined)
        store.wait(["go"])  # rank 0 comes when both have failed
        if channel.rank == 1:
            channel.round("x", second, joined)
        channel.round("x", b"", joined)

    def conduct() -> None:
        state = "tierload/run/state/1.0.0"
        while not store.check([state]):
            time.sleep(0.001)
        store.set("go", "1")

    conductor = threading.Thread(target=conduct)
    conductor.start()
    found = in_threads(3, body, store=store)
    conductor.join()
    assert found[2] is first
    assert all("first" in str(error) for error in found)
    assert any("second" in note for note in found[1].__notes__)


def test_a_reader_gets_the_error_of_the_round_that_rank_0_is_in() -> None:
    def body(channel: Channel) -> object:
        said: list[object] = []
        for fails in (True, False):
            channel.begin()
            try:
                if channel.rank == 0:
                    if fails:
                        channel.round("describe", StoreBusy("held"), joined)
                    channel.post("digests", b"d")
                else:
                    said.append(channel.read("digests"))
                said.append(channel.round("describe", b"x", joined))
            except StoreBusy as error:
                said.append(type(error))
        return said

    assert in_threads(3, body) == [[StoreBusy, b"x,x,x"]] + [[StoreBusy, b"d", b"x,x,x"]] * 2


def test_rounds_go_on_after_errors_with_no_new_beginning() -> None:
    def body(channel: Channel) -> object:
        said: list[object] = []
        for number in range(12):
            try:
                said.append(channel.round("x", ValueError() if number % 4 == channel.rank else b"%d" % number, joined))
            except (ValueError, RankFailed):
                said.append("failed")
        return said

    expected = [b",".join([b"%d" % n] * 3) if n % 4 == 3 else "failed" for n in range(12)]
    assert in_threads(3, body) == [expected] * 3


def test_ranks_that_are_in_different_rounds_are_told_so() -> None:
    found = in_threads(3, lambda channel: channel.round("describe" if channel.rank else "commit", b"", joined))
    assert [type(error) for error in found] == [RanksDisagree] * 3
    assert found[2].differences == ("rank 1 is at 'describe'", "rank 2 is at 'describe'")


def test_channels_of_two_names_do_not_meet() -> None:
    store = dist.HashStore()

    def body(channel: Channel) -> bytes:
        other = Channel(store, channel.rank, 3, name="run/1", limit_seconds=20)
        first = channel.round("x", b"a", joined)
        return first + other.round("x", b"b", joined) + channel.round("x", b"c", joined)

    assert in_threads(3, body, store=store) == [b"a,a,ab,b,bc,c,c"] * 3


def test_a_later_channel_of_the_same_name_begins_anew() -> None:
    store = dist.HashStore()
    for word in (b"a", b"b"):
        assert (
            in_threads(3, lambda channel, w=word: channel.round("x", w, joined), store=store)
            == [b",".join([word] * 3)] * 3
        )


def test_a_channel_that_nobody_holds_has_no_thread() -> None:
    store = dist.HashStore()
    before = set(threading.enumerate())
    channel = Channel(store, 0, 1, name="run", limit_seconds=20)
    channel.round("x", b"1", joined)
    own = set(threading.enumerate()) - before
    assert len(own) == 1
    del channel
    for thread in own:
        thread.join(10)
        assert not thread.is_alive()


def test_a_thousand_saves_leave_few_keys() -> None:
    store = dist.HashStore()

    def body(channel: Channel) -> None:
        for number in range(1000):
            channel.begin()
            if channel.rank == 0:
                channel.post("digests", b"d")
            else:
                channel.read("digests")
            try:
                channel.round("x", ValueError() if number % 3 == channel.rank else b"", joined)
            except (ValueError, RankFailed):
                continue
            channel.round("y", b"", joined)

    in_threads(2, body, store=store)
    assert store.num_keys() < 40


def test_a_message_shows_ten_differences_and_says_how_many_more_there_are() -> None:
    error = errors.RanksDisagree("the states differ", differences=[f"key {n}" for n in range(25)])
    assert len(error.differences) == 25
    assert "key 9" in str(error)
    assert "key 10" not in str(error)
    assert str(error).endswith("and 15 more")
