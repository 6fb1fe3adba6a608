"""Confines a process to the files and operations that a submission needs; for good.

On Linux the kernel does it: Landlock for files, seccomp for system calls, and no capabilities. Where
``bwrap`` (bubblewrap) is installed and works, the process starts in namespaces of its own as well.
Elsewhere a hook of Python's is all there is, which stops accidents and no determined attack.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from threading import Event
from typing import Any

#: What programs and libraries read of a system, beside Python.
SYSTEM = (
    "/usr", "/bin", "/lib", "/lib32", "/lib64", "/nix/store", "/System", "/Library", "/sys",
    "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/os-release", "/proc/self",
    "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys", "/dev/null", "/dev/zero",
    "/dev/urandom", "/dev/random",
)  # fmt: skip
OF_GPU = ("/dev", "/proc", "/opt", "/run", "/etc")


def readable(tree: str, hidden: list[str], gpu: bool) -> list[str]:
    """Return what a submission may read, beside the folders that it may write to.

    Args:
        tree: Its own.
        hidden: Folders that have solutions; what else lies beside them may be read.
        gpu: A driver reads more.
    """
    paths = [*SYSTEM, *(OF_GPU if gpu else ()), sys.prefix, sys.base_prefix]
    paths += [os.environ.get("CUDA_HOME", ""), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    paths += [os.environ.get("SYSTEMROOT", "")]
    # An environment may lie inside the course's folder, and the course inside of an environment.
    hidden = [os.path.realpath(folder) for folder in hidden]
    paths = [path for path in paths if path and os.path.exists(path)]
    return [tree, *(part for path in dict.fromkeys(paths) for part in _without(path, hidden))]


def _without(path: str, hidden: list[str]) -> Iterator[str]:
    real = os.path.realpath(path)
    if real in hidden:
        return
    if not any(inside(folder, real) for folder in hidden):
        yield path
        return
    for name in sorted(os.listdir(real)):
        yield from _without(os.path.join(real, name), hidden)


def inside(path: str, folder: str) -> bool:
    """Tell whether a path is a folder or lies inside it; both are real paths."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


# -- Landlock: its system calls have these numbers on every processor ------------------------------

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
NO_NEW_PRIVILEGES = 38  # of prctl
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
TRUNCATE, USE_DEVICE = 1 << 14, 1 << 15
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | USE_DEVICE
#: Rights to change files, by the version of Landlock that brought them.
CHANGES = {1: 0x1FF0 | WRITE_FILE, 2: 1 << 13, 3: TRUNCATE, 5: USE_DEVICE}
NETWORK, SCOPES = 0b11, 0b11  # TCP; abstract sockets and signals to others


def landlock_version() -> int:
    """Return which version of Landlock the kernel has; 0 for none."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1), 0)


def landlock(writable: list[str], shown: list[str], gpu: bool) -> None:
    """Let the kernel allow this process some folders only, where it can.

    Args:
        writable: What it may change and read.
        shown: What it may read.
        gpu: Allow it to use devices and to start programs, as a GPU's driver does.

    Raises:
        OSError: If the kernel has Landlock and refuses these rules.
    """
    version = landlock_version()
    if version < 1:
        return
    libc, read = ctypes.CDLL(None, use_errno=True), READ_FILE | READ_DIR
    change = sum(right for since, right in CHANGES.items() if since <= version) | read
    rights = change | (0 if gpu else EXECUTE)
    more = NETWORK if version >= 4 else 0, SCOPES if version >= 6 else 0
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = libc.syscall(CREATE_RULESET, struct.pack("=QQQ", rights, *more)[:size], size, 0)
    allowed = [(path, read) for path in shown] + [(path, change) for path in writable]
    allowed += [("/dev/null", read | WRITE_FILE)]
    # A driver writes the names of its threads to /proc/self/task/*/comm.
    allowed += [("/dev", change), ("/proc/self/task", read | WRITE_FILE)] * gpu
    failed = rules < 0
    for path, own in allowed:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        own = own if os.path.isdir(path) else own & OF_FILES
        failed |= libc.syscall(ADD_RULE, rules, 1, struct.pack("=Qi", own, handle), 0) != 0
        os.close(handle)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if failed or libc.syscall(RESTRICT_SELF, rules, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel has Landlock, and refuses its rules")
    os.close(rules)


# -- seccomp -----------------------------------------------------------------------------------------

#: Numbers of the system calls that are refused, on x86_64 and on aarch64 (None: it has no such call).
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "removexattrat": (466, 466), "file_setattr": (469, 469), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "kcmp": (312, 272), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
}  # fmt: skip
#: Refused unless a GPU's driver may need them.
NOT_WITH_GPU = {"socket": (41, 198), "fork": (57, None), "vfork": (58, None)}
#: Allowed on the process itself, by their first argument.
ON_ITSELF = {
    "kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274),
}  # fmt: skip
CLONE, SECCOMP = (56, 220), (317, 277)
IO_URING, CLONE3, CAPSET = 425, 435, (126, 91)
CLONE_THREAD = 0x10000
PROCESSORS = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
HAS_FILTERS = sys.platform.startswith("linux") and platform.machine() in PROCESSORS
BY_FILTER, NEW_LISTENER = 1, 8
#: Instructions of the kernel's filter machine, and the answers that it gives.
LOAD, IF_EQUAL, IF_AT_LEAST, IF_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, ASK = 0x7FFF0000, 0x00050000, 0x7FC00000
#: Where the filter finds the number of a call, the processor, and the first argument.
NUMBER, PROCESSOR, FIRST = 0, 4, 16
#: Of the listener: its two requests, and the sizes of a question and an answer.
RECEIVE, SEND, QUESTION = 0xC0502100, 0xC0182101, 80


def seccomp(report: socket.socket | None, gpu: bool) -> None:
    """Let the kernel refuse this process new processes, sockets and what Landlock does not see.

    Threads are allowed: the C library makes them by ``clone`` where there is no ``clone3``.

    Args:
        report: Gets the listener that learns of each refused call, for the parent.
        gpu: Allow programs and sockets.

    Raises:
        OSError: If the kernel refuses the filter.
    """
    if not HAS_FILTERS:
        return
    column, processor = PROCESSORS[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    # No capabilities, which root has: an empty set of each kind.
    libc.syscall(CAPSET[column], struct.pack("=Ii", 0x20080522, 0), bytes(24))
    for no in (ASK, REFUSE | errno.EPERM):  # an old kernel has no listeners, nor has one in another
        code = b"".join(struct.pack("=HBBI", *step) for step in _filter(column, processor, no, gpu))
        memory = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("@HP", len(code) // 8, ctypes.addressof(memory))
        asks = no == ASK and report is not None
        if no == ASK and not asks:
            continue
        found = libc.syscall(SECCOMP[column], BY_FILTER, NEW_LISTENER if asks else 0, program)
        if found >= 0:
            if asks and report is not None:
                socket.send_fds(report, [b"x"], [found])
                os.close(found)
            return
    raise OSError(ctypes.get_errno(), "the kernel refuses a filter of system calls")


def _filter(column: int, processor: int, no: int, gpu: bool) -> list[tuple[int, int, int, int]]:
    """Return steps: an instruction, how many to skip if it holds and if not, and its operand."""
    calls = REFUSED if gpu else REFUSED | NOT_WITH_GPU
    answers = dict.fromkeys((IO_URING, CLONE3), REFUSE | errno.ENOSYS)
    answers |= {n: no for numbers in calls.values() if (n := numbers[column]) is not None}
    steps = [
        (LOAD, 0, 0, PROCESSOR), (IF_EQUAL, 1, 0, processor), (RETURN, 0, 0, REFUSE | errno.EPERM),
        (LOAD, 0, 0, NUMBER),
        (IF_AT_LEAST, 0, 1, 1 << 30), (RETURN, 0, 0, REFUSE | errno.EPERM),  # second numbers
    ]  # fmt: skip
    for call, answer in answers.items():
        steps += [(IF_EQUAL, 0, 1, call), (RETURN, 0, 0, answer)]
    for numbers in ON_ITSELF.values():
        steps += [
            (IF_EQUAL, 0, 5, numbers[column]), (LOAD, 0, 0, FIRST), (IF_EQUAL, 2, 0, 0),
            (IF_EQUAL, 1, 0, os.getpid()), (RETURN, 0, 0, no), (RETURN, 0, 0, ALLOW),
        ]  # fmt: skip
    if not gpu:
        steps += [
            (IF_EQUAL, 0, 3, CLONE[column]), (LOAD, 0, 0, FIRST),
            (IF_SET, 1, 0, CLONE_THREAD), (RETURN, 0, 0, no),
        ]  # fmt: skip
    return [*steps, (RETURN, 0, 0, ALLOW)]


def refused_calls(channel: socket.socket, ended: Event) -> Iterator[str]:
    """Refuse what a confined process asks for, until it ends; yield the names of the calls.

    Args:
        channel: The other end of what :func:`seccomp` got.
        ended: Is set when the process has ended.
    """
    fcntl, select = import_module("fcntl"), import_module("select")
    column, _ = PROCESSORS[platform.machine()]
    known = {
        numbers[column]: name for name, numbers in (REFUSED | NOT_WITH_GPU | ON_ITSELF).items()
    }
    _, handles, *_ = socket.recv_fds(channel, 1, 1)
    for listener in handles:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while not ended.is_set():
            events = poll.poll(500)
            if not events:
                continue
            if not events[0][1] & select.POLLIN:  # nobody is left to ask
                break
            question = bytearray(QUESTION)
            try:
                fcntl.ioctl(listener, RECEIVE, question)
                number, call = (
                    struct.unpack_from("=Q", question)[0],
                    struct.unpack_from("=i", question, 16),
                )
                fcntl.ioctl(listener, SEND, struct.pack("=QqiI", number, 0, -errno.EPERM, 0))
            except OSError:  # who asked has ended
                continue
            yield known.get(call[0], "clone")
        os.close(listener)


# -- bubblewrap --------------------------------------------------------------------------------------


NAMESPACES = ("bwrap", "--unshare-all", "--die-with-parent", "--proc", "/proc", "--dev", "/dev")


@cache
def has_bubblewrap() -> bool:
    """Tell whether ``bwrap`` is installed, and may make namespaces here."""
    if shutil.which("bwrap") is None:
        return False
    command = ["bwrap", "--ro-bind", "/", "/", *NAMESPACES[1:], "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def in_namespaces(command: list[str], writable: list[str], shown: list[str]) -> list[str]:
    """Return a command that runs another one where there are only some folders and no other process."""
    binds = [("--ro-bind", path) for path in shown if not path.startswith(("/proc", "/dev"))]
    binds += [("--bind", path) for path in writable]
    folders = [part for option, path in binds for part in (option, path, path)]
    return [*NAMESPACES, "--chdir", "/", *folders, *command]


def not_guaranteed() -> str:
    """Return what this system cannot prevent, in a sentence; empty if the kernel helps."""
    if (HAS_FILTERS and landlock_version()) or has_bubblewrap():
        return ""
    return (
        "this system has neither bwrap nor Landlock: a submission that means to can read and change "
        "whatever your user can, start processes and use the network"
    )


# -- Python's hook -----------------------------------------------------------------------------------

PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork",
            "os.forkpty", "os.startfile", "pty.spawn")  # fmt: skip
CHANGED = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate",
           "os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr")  # fmt: skip
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def guard(
    writable: list[str], shown: list[str], report: Callable[[str], None]
) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that refuses what a submission may not do, with a clear text.

    Args:
        writable: Where changes are allowed.
        shown: What may be read as well.
        report: Gets the text.
    """
    exists, realpath = os.path.lexists, os.path.realpath
    writable, shown = ([realpath(path) for path in paths] for paths in (writable, shown))

    def refuse(text: str) -> None:
        report(text)
        raise PermissionError(f"a submission may not {text}")

    def check(path: Any, folders: list[str], verb: str) -> None:
        if isinstance(path, (str, bytes, os.PathLike)):
            real = realpath(os.fsdecode(path))
            allowed = real == os.devnull or any(inside(real, folder) for folder in folders)
            if not allowed and (verb == "change" or exists(real)):
                refuse(f"{verb} {real}, outside of its folders")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            if (isinstance(mode, str) and set(mode) & set("wax+")) or (flags or 0) & WRITE_FLAGS:
                check(path, writable, "change")
            else:
                check(path, writable + shown, "read")
        elif event in CHANGED:
            # A number above 2 is the handle of a folder that the path is relative to.
            if not any(isinstance(arg, int) and arg > 2 for arg in args[1:]):
                for path in args[:2]:
                    check(path, writable, "change")
        elif event in PROGRAMS:
            refuse(f"start programs ({event})")

    return hook
