from __future__ import annotations

import os
import signal

import pytest

from pipeline.cli.entry import uninterrupted


@pytest.fixture
def heard():
    """Whoever starts the tests in the background has them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_during_an_import_is_heard_behind_it(heard):
    whole = False
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        whole = True
    assert whole
    with uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
