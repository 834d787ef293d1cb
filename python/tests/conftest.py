"""What holds for all tests."""

import signal

# A shell starts its background jobs with SIGINT ignored, and children inherit that; here it must
# arrive, because the tests of interruption send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
