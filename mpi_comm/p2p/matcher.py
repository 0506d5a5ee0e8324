"""Matching of messages and receives in a group's communicator.

MPI's tags are short, and its receives check neither dtype nor size before data arrives. So a
message begins with a header: the user's tag, dtype and size. A small (eager) message is sent
together with its header. The header of a large message announces the MPI tag of the payload, which
is received directly into the array of the matching receive. Headers are found by matched probes:
receives from MPI_ANY_SOURCE that are posted before the messages come lose some of them with MPICH 5
over UCX.

An exception of a signal's handler may end a change of the state here at any point; ``_changing``
then stays set. As a message may be lost, nothing is matched any more until the group fails, which
it does when the exception leaves the call. What MPI may use is kept alive.

:meth:`RequestMatcher.start` and :meth:`~RequestMatcher.poll` call MPI, so they run on a thread that
may call it; the other methods run on any thread.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
import zlib
from threading import get_ident
from typing import Any

import numpy as np

from mpi_comm.flat_memory import deliver_bytes
from mpi_comm.group_communicator import HEADER_TAG, PAYLOAD_TAGS, GroupCommunicator
from mpi_comm.p2p.requests import ArrivedMessage, PendingRequest, all_done
from unicoll.arrays.device_flat import DeviceFlat, DeviceMemory
from unicoll.arrays.kernels import Flat
from unicoll.backend import Call, Context
from unicoll.backend.host import MessageMatcher
from unicoll.backend.operation_errors import check_message
from unicoll.calls.ops import PROBE
from unicoll.errors import MessageMismatchError
from unicoll.net.control.wait_graph import MessageState

_HEADER = struct.Struct("<qqqq")
"""The user's tag, dtype code and mark of the group, bytes of payload, MPI's tag of the payload (0
if it is in the same message)."""
PACK = _HEADER.pack
_MARK_SHIFT = 16
EAGER_LIMIT = 4096
"""Bytes of the longest message that is sent together with its header."""
_CHUNK = 1 << 30
"""Bytes of payload in one MPI message: counts stay far below 2^31."""
_MATCH_WAIT_S = 0.002
"""How long an announced payload waits for a matching receive before it is received into temporary
memory."""


class RequestMatcher:
    """Sends, posted receives and probes, and unexpected messages of one group.

    Attributes:
        mark: of the group, added to the dtype code. A communicator may get the context of one that
            was freed, and with it a message that was sent there and not received. MPICH refuses to
            free a communicator only if it has seen the message by then.
        sent: for each member a counter of the messages to it, which every send advances.
        failed: True once a call of MPI has failed.
    """

    def __init__(self, context: Context, group: GroupCommunicator) -> None:
        self._context = context
        self._group = group
        self._mpi = group.mpi
        self._byte = group.mpi.MPI.BYTE
        self.mark = zlib.crc32(context.name.encode()) << _MARK_SHIFT
        # Reentrant, since a signal's handler or a finalizer may make a call on the thread that
        # holds it.
        self._lock = threading.RLock()
        self._matcher: MessageMatcher[PendingRequest, ArrivedMessage] = MessageMatcher(context.size)
        self._sending: list[PendingRequest] = []
        # Sends that have ended with an error; MPI still uses their arrays.
        self._given_up: list[PendingRequest] = []
        # Messages whose payload is being received.
        self._incoming: list[ArrivedMessage] = []
        # Messages whose payload has no receive yet.
        self._announced: list[ArrivedMessage] = []
        self._serials = [0] * context.size
        # The numbers of headers to and from each member. Several threads send at once, without the
        # lock, so these are iterators: next() of an itertools.count is atomic.
        self.sent = [itertools.count() for _ in range(context.size)]
        self._received = [0] * context.size
        # How often message_state() has advanced a counter to read it.
        self._links = [0] * context.size
        self._tag_span = group.mpi.largest_tag // 2 - PAYLOAD_TAGS
        # The receive of one header at a time is in progress, so all of them use one buffer.
        self._header_buffer = bytearray(_HEADER.size + EAGER_LIMIT)
        # True from the first receive or message to this rank itself on, which is when probing for
        # headers starts.
        self._receives = False
        # The receive of the header of a message that a probe has found, until it is done.
        self._header_receive: Any = None
        self._header_peer = -1
        self._status = group.mpi.MPI.Status()
        self.failed = False
        # True once MPI keeps a request that was given up.
        self._abandoned = False
        # Identifier of the thread that changes the state, or 0. If it is set while the lock is
        # free, an exception has interrupted that change.
        self._changing = 0
        # The device of the last message in device memory. Polls bind it, too: MPI may move the data
        # in any later call.
        self._device: DeviceMemory | None = None

    def start(self, request: PendingRequest) -> None:
        """Start a send, receive or probe; called on a thread that may call MPI."""
        if isinstance(request.view, DeviceFlat):
            self._device = request.view.memory
        if self._device is None:
            self._start(request)
        else:
            # MPI requires that the memory's device is the current device of the calling thread.
            with self._device.bound():
                self._start(request)

    def _start(self, request: PendingRequest) -> None:
        with self._lock:
            before = self._changing
            if self._in_doubt():
                raise InterruptedError("a message of another thread was interrupted")
            # This is taken back by the last line, and not in a finally: after an exception it stays
            # set, so that all other threads find the state in doubt.
            self._changing = get_ident()
            if request.call.inputs:
                self._send(request)
            else:
                self._post(request)
            self._changing = before

    def _in_doubt(self) -> bool:
        """True if a change of another thread was interrupted; one of this thread is in progress,
        and calls back."""
        return self._changing not in (0, get_ident())

    def _post(self, request: PendingRequest) -> None:
        self._receives = True
        if request.call.op is PROBE:
            if self._matcher.post_probe(request):
                request.completion.finish()
            return
        message = self._matcher.post_receive(request)
        if message is not None:
            self._assign(message, request)

    def _send(self, request: PendingRequest) -> None:
        comm, byte, call = self._group.comm, self._mpi.MPI.BYTE, request.call
        size, peer = request.view.size, call.peer
        assert call.tag is not None
        code = call.inputs[0].dtype.code + self.mark
        # A large message to this rank itself ends only when its payload is received, which may have
        # to be before the program posts a receive: a blocking send is waited for here.
        if peer == self._context.rank:
            self._receives = True
        # Before MPI gets the message: see MPIP2PEngine._send_small().
        next(self.sent[peer])
        if size <= EAGER_LIMIT:
            packed, tag = PACK(call.tag, code, size, 0) + request.view.tobytes(), 0
        else:
            # Large messages that are in flight to a member at once have different tags. So each
            # payload finds its receive, in whatever order these are posted.
            serial = self._serials[peer] = (self._serials[peer] + 1) % self._tag_span
            tag = PAYLOAD_TAGS + serial
            packed = PACK(call.tag, code, size, tag)
        try:
            request.mpi_requests.append(comm.Isend([packed, byte], peer, HEADER_TAG))
            if tag:
                for start in range(0, size, _CHUNK):
                    request.mpi_requests.append(
                        comm.Isend([request.view[start : start + _CHUNK], byte], peer, tag)
                    )
        except BaseException:
            self.keep(request, packed)
            raise
        if all_done(request.mpi_requests):
            request.completion.finish()
        else:
            self._sending.append(request)

    def _assign(self, message: ArrivedMessage, request: PendingRequest) -> None:
        """Match a message with a receive."""
        message.receiver = request
        request.matched = True
        if message.data is None:
            # A message that does not fit is received into other memory, so that its send ends. Then
            # the receive raises.
            fits = request.call.accepts(message.code, message.size)
            self._receive_payload(message, request.view[: message.size] if fits else None)
        elif not message.mpi_requests:
            self._deliver(message)

    def _receive_payload(self, message: ArrivedMessage, target: Flat | None) -> None:
        """Post the receives of a payload, into ``target`` or temporary memory."""
        comm, byte = self._group.comm, self._byte
        message.in_place = target is not None
        message.data = data = target if target is not None else np.empty(message.size, np.uint8)
        try:
            for start in range(0, message.size, _CHUNK):
                chunk = data[start : start + _CHUNK]
                message.mpi_requests.append(
                    comm.Irecv([chunk, byte], message.peer, message.payload_tag)
                )
            self._incoming.append(message)
        except BaseException:
            self.keep(message, data)
            raise

    def keep(self, *memory: Any) -> None:
        """Keep memory alive that MPI may use for a request which an exception has kept from being
        stored."""
        self._abandoned = True
        self._mpi.abandoned.append(memory)

    # --- progress ---------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Test all requests once; returns True if any has progressed."""
        if self._device is None:
            return self._poll()
        with self._device.bound():
            return self._poll()

    def _poll(self) -> bool:
        with self._lock:
            before = self._changing
            if self._in_doubt():
                return False
            # MPI is asked before the state is marked as changing: most interrupts come while
            # nothing has arrived, and must not leave the messages in doubt. Improbe() would take a
            # message from MPI.
            arrives = self._receives and self._header_arrives()
            if not (
                arrives or self._incoming or self._announced or self._sending or self._given_up
            ):
                return False
            self._changing = get_ident()
            progressed = arrives and self._poll_headers()
            if self._incoming or self._announced:
                progressed |= self._poll_payloads()
            if self._sending or self._given_up:
                progressed |= self._poll_sends()
            self._changing = before
            return progressed

    def _poll_payloads(self) -> bool:
        if self._announced:
            self._receive_overdue()
        complete = [m for m in self._incoming if all_done(m.mpi_requests)]
        for message in complete:
            self._incoming.remove(message)
            if message.receiver is not None:
                self._deliver(message)
        return bool(complete)

    def _receive_overdue(self) -> None:
        """Receive payloads that have waited too long into temporary memory, so that their sends
        complete."""
        now = time.monotonic()
        for message in [
            m for m in self._announced if m.data is not None or now - m.arrived_at > _MATCH_WAIT_S
        ]:
            self._announced.remove(message)
            if message.data is None:
                self._receive_payload(message, None)

    def _poll_sends(self) -> bool:
        # These are tested so that their arrays are released once MPI has sent them.
        self._given_up = [r for r in self._given_up if not all_done(r.mpi_requests)]
        sent = [r for r in self._sending if all_done(r.mpi_requests)]
        for request in sent:
            self._sending.remove(request)
            request.completion.finish()
        return bool(sent)

    # --- headers ----------------------------------------------------------------------------------

    def _header_arrives(self) -> bool:
        """True if there is a header to receive; takes no message from MPI, as Improbe does."""
        comm = self._group.comm
        return self._header_receive is not None or comm.Iprobe(self._mpi.MPI.ANY_SOURCE, HEADER_TAG)

    def _poll_headers(self) -> bool:
        progressed = False
        probe, status, buffer = self._group.comm.Improbe, self._status, self._header_buffer
        any_source, arguments = self._mpi.MPI.ANY_SOURCE, [buffer, self._byte]
        # After 16 headers the payloads have their turn, however many small messages there are.
        for _ in range(16):
            if self._header_receive is None:
                found = probe(any_source, HEADER_TAG, status)
                if found is None:
                    break
                self._header_peer = status.Get_source()
                self._header_receive = found.Irecv(arguments)
            # The rest of the header comes when the sender calls MPI again.
            if not self._header_receive.Test():
                break
            self._header_receive, peer = None, self._header_peer
            tag, marked, size, payload = _HEADER.unpack_from(buffer)
            code = marked - self.mark
            # The message belongs to a group that had this context before.
            if not 0 <= code < 1 << _MARK_SHIFT:
                self._drop(peer, size, payload)
                progressed = True
                continue
            # The next header is received into the same buffer, so the data is copied.
            data = None if payload else np.frombuffer(buffer, np.uint8, size, _HEADER.size).copy()
            # The message is counted and matched with the lock held. Whoever reads the count of a
            # message therefore sees its receive as no longer posted.
            self._received[peer] += 1
            message = ArrivedMessage(peer, tag, code, size, payload)
            message.data = data
            self._match_posted(message)
            progressed = True
        return progressed

    def _drop(self, peer: int, size: int, payload: int) -> None:
        """Receive the payload of a message of a group that has ended, for nobody."""
        if payload:
            self._receive_payload(ArrivedMessage(peer, 0, 0, size, payload), None)

    def _match_posted(self, message: ArrivedMessage) -> None:
        """Match a message that has arrived with the first posted receive that takes it, if there is
        one."""
        peer, tag = message.peer, message.tag
        request = self._matcher.find_receive(peer, tag)
        if request is not None:
            self._matcher.match(request, peer, tag, message.code, message.size)
            self._assign(message, request)
            return
        # The payload waits for a receive of the user for a moment, and so needs no copy. After that
        # it is received into other memory, because its sender waits.
        if message.data is None:
            self._announced.append(message)
        for probe in self._matcher.add_unexpected(message):
            probe.completion.finish()

    def _deliver(self, message: ArrivedMessage) -> None:
        """Complete the receive of a message that has arrived in full; with an error if sizes or
        dtypes differ."""
        request = message.receiver
        assert request is not None
        try:
            check_message(self._context, request.call, message.size, message.code)
        except MessageMismatchError as error:
            request.completion.finish(error)
            return
        if message.data is not None and not message.in_place:
            deliver_bytes(request.view[: message.size], message.data)
        request.call.write_back()
        request.completion.finish()

    # --- state ------------------------------------------------------------------------------------

    def pending_requests(self) -> list[PendingRequest]:
        """All sends and receives that are not complete."""
        with self._lock:
            incoming = [m.receiver for m in self._incoming if m.receiver is not None]
            return [*self._matcher.posted, *self._sending, *incoming]

    def needs_peer(self, call: Call) -> bool:
        """True for a receive or probe whose message has not come."""
        with self._lock:
            return any(request.call is call for request in self._matcher.posted)

    def others(self, call: Call) -> str:
        """The messages that a receive or probe does not match, for its error."""
        with self._lock:
            return self._matcher.others(call)

    def message_state(self, peer: int) -> MessageState:
        """The numbers of messages to and from a member."""
        # An iterator can be read only by advancing it, so what reading has added is subtracted.
        with self._lock:
            sent = next(self.sent[peer]) - self._links[peer]
            self._links[peer] += 1
            return MessageState(sent, self._received[peer])

    def pending(self) -> bool:
        """True if any operation or payload is pending."""
        return bool(self._matcher.posted or self._sending or self._incoming or self._announced)

    def sending(self) -> bool:
        """True if sends are pending."""
        return bool(self._sending)

    def receiving(self) -> bool:
        """True if payloads are being received: MPI then needs frequent progress calls."""
        return bool(self._incoming)

    @property
    def idle(self) -> bool:
        """True if MPI has no request of this group."""
        with self._lock:
            requests = (
                self._sending
                or self._given_up
                or self._incoming
                or self._header_receive is not None
            )
            return not (requests or self._abandoned or self.failed)

    def add_send(self, request: PendingRequest) -> None:
        """Add a send that has been started and is not complete."""
        with self._lock:
            self._sending.append(request)

    def withdraw(self, request: PendingRequest, error: BaseException | None = None) -> None:
        """Give up a request, with an error if it has a waiter.

        A posted receive no longer matches; the array of a send is kept until MPI has sent it.
        """
        with self._lock:
            # The value before is put back at the end: a doubt that another thread's interrupted
            # change has left must stay.
            before, self._changing = self._changing, get_ident()
            self._matcher.cancel(request)
            if request in self._sending:
                self._sending.remove(request)
                self._given_up.append(request)
            for message in [m for m in self._incoming if m.receiver is request]:
                # The payload is received in any case, and then dropped: MPI cannot cancel it.
                message.receiver = None
            if error is not None:
                request.completion.finish(error)
            self._changing = before

    def take_back(self, request: PendingRequest) -> bool:
        """Cancel a receive or probe of which nothing has come; False if something has, or may
        have."""
        with self._lock:
            # In a change, or after one that was interrupted, the message may have been taken from
            # MPI already.
            if self._changing or request not in self._matcher.posted:
                return False
            self._changing = get_ident()
            self._matcher.cancel(request)
            self._changing = 0
            return True

    def abandon_all(self) -> list[PendingRequest]:
        """Abandon all requests and return them."""
        with self._lock:
            requests = self.pending_requests()
            self._matcher.cancel_all()
            # An interrupted change may have posted the receive of a header without storing it. So
            # the buffer then counts as in use.
            header_in_use = self._header_receive is not None or self._changing != 0
            if self._sending or self._given_up or self._incoming or header_in_use:
                self._abandoned = True
            # MPI may use these arrays until the process ends: no thread tests the requests any
            # more.
            for request in (*self._sending, *self._given_up):
                self._mpi.abandoned.append((request.mpi_requests, request.view))
            for message in self._incoming:
                self._mpi.abandoned.append((message.mpi_requests, message.data))
            if header_in_use:
                self._mpi.abandoned.append((self._header_receive, self._header_buffer))
            self._sending.clear()
            self._given_up.clear()
            self._incoming.clear()
            self._announced.clear()
            # Nothing is left that an interrupted change could have made wrong.
            self._changing = 0
            return requests
