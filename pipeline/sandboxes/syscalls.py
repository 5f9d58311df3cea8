"""System calls that no namespace holds back, refused by a seccomp filter: the host's keyrings, sockets that reach it past the
network namespace (vsock), and io_uring, which makes sockets without asking.

Invariant: these fail with EPERM, a call of another architecture ends its process, and every other is as it was.
"""

from __future__ import annotations

import functools
import os
import platform
import struct
from dataclasses import dataclass

from pipeline.errors import SandboxError

FAMILIES = (1, 2, 10, 16)
"""Of sockets: unix, IPv4, IPv6 and netlink stay within the network namespace."""
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
"""Of classic BPF: ld [k], jeq k, jge k, ret k."""
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data; the last is the low half of the first argument."""
_ENDS = (0x00050001, 0x80000000, 0x7FFF0000)
"""What the last instructions return: SECCOMP_RET_ERRNO with EPERM, SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_ALLOW."""
_REFUSE, _KILL, _ALLOW = 3, 2, 1
"""Where they stand, from the end."""
_X32 = 0x40000000
"""x86_64 has a second table of numbers from here on."""


@dataclass(frozen=True, slots=True)
class Machine:
    audit: int
    """AUDIT_ARCH_*."""
    socket: int
    refused: tuple[int, ...]
    """add_key, request_key, keyctl, io_uring_setup."""


MACHINES = {
    "x86_64": Machine(0xC000003E, 41, (248, 249, 250, 425)),
    "aarch64": Machine(0xC00000B7, 198, (217, 218, 219, 425)),
}


def open_filter() -> int:
    """A file descriptor from which bubblewrap reads the filter; who asks closes it. Raises SandboxError."""
    file = os.memfd_create("seccomp")
    os.write(file, program(platform.machine()))
    os.lseek(file, 0, os.SEEK_SET)
    return file


@functools.cache
def program(machine: str) -> bytes:
    """struct sock_filter[]. Raises SandboxError for a machine whose numbers are not known here."""
    if machine not in MACHINES:
        raise SandboxError(f"local sandboxes run on {' and '.join(MACHINES)}, not on {machine}")
    known = MACHINES[machine]
    lines = [  # code, value, where to go when it holds and when it does not; 0: on
        (_LOAD, _ARCHITECTURE, 0, 0),
        (_EQUAL, known.audit, 0, _KILL),
        (_LOAD, _NUMBER, 0, 0),
        *((_EQUAL, number, _REFUSE, 0) for number in known.refused),
        (_AT_LEAST, _X32, _REFUSE, 0),
        (_EQUAL, known.socket, 0, _ALLOW),
        (_LOAD, _ARGUMENT, 0, 0),
        *((_EQUAL, family, _ALLOW, 0) for family in FAMILIES),
        *((_RETURN, end, 0, 0) for end in _ENDS),
    ]
    return b"".join(
        struct.pack("=HBBI", code, *(len(lines) - place - number - 1 if place else 0 for place in places), value)
        for number, (code, value, *places) in enumerate(lines)
    )
