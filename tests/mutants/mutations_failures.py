"""Faults of what comes after a failure: restarts, who is named, hangs, one writer, saves, servers, and who is there."""

from __future__ import annotations

from mutation import Mutation

RESTARTS, SIZE, FAILURE = "launch/restarts.py", "launch/restarts.py", "launch/failure.py"
POOL, HANGS = "launch/worker_pool.py", "launch/hangs.py"
WRITER, FOLDER = "files/single_writer.py", "checkpoint/folder.py"
REQUESTS, QUEUE = "train/parameter_server/requests.py", "parallel/parameter_server/work_queue.py"
OF_SAVES, OF_HANGS, OF_SERVERS = (
    "unit/test_checkpoint_saves.py",
    "unit/test_hangs.py",
    "unit/test_server_update.py",
)

FAILURES = (
    Mutation(
        "restarts: one more than was allowed",
        RESTARTS,
        "if self.count >= self._limit or not",
        "if self.count > self._limit or not",
        ("test faults/test_elastic.py often_as_was_said",),
    ),
    Mutation(
        "restarts: what was saved since the last one is not looked at",
        RESTARTS,
        "failure.kind, self._saved())",
        "failure.kind)",
        ("test faults/test_elastic.py saved_in_between",),
    ),
    Mutation(
        "elastic: the fewest devices in place of the next fewer",
        SIZE,
        "self.devices, self.cause = max(fewer)",
        "self.devices, self.cause = min(fewer)",
        ("test unit/test_device_numbers.py shrinks_down",),
    ),
    Mutation(
        "who failed first: whoever says so first, if it only lost its peer",
        FAILURE,
        "key=lambda failure: (failure.lost_peer, failure.time)",
        "key=lambda failure: failure.time",
        ("test faults/test_launch_faults.py held",),
    ),
    Mutation(
        "who failed first: a launcher that was late does not look once more",
        POOL,
        "            self._listen(_SOON)  # once more if it is late: this process may have been held meanwhile\n"
        "            if late:\n                return\n",
        "            if late:\n                return\n            self._listen(_SOON)\n",
        ("test faults/test_launch_faults.py held",),
    ),
    Mutation(
        "stop signals: a run that has saved nothing says that it has",
        "launch/reaper.py",
        "raise SystemExit(SAVED if saved else 128 + number)",
        "raise SystemExit(SAVED)",
        ("test faults/test_stopping.py newest_checkpoint_stands",),
    ),
    Mutation(
        "hang report: whoever does not wait is blamed, whomever others wait for",
        HANGS,
        "[one for one in awaited if not one.waits] or idle",
        "idle",
        (f"test {OF_HANGS} to_blame",),
    ),
    Mutation(
        "hang report: a rank in the same exchange has not come to it",
        HANGS,
        "if begun.get(call.group, 0) < call.number",
        "if begun.get(call.group, 0) <= call.number",
        (f"test {OF_HANGS} to_blame",),
    ),
    Mutation(
        "hang watch: only the last rank's steps count",
        HANGS,
        "for rank, one in ranks.items()}\n        if steps",
        "for rank, one in list(ranks.items())[-1:]}\n        if steps",
        (f"test {OF_HANGS} server_without_steps",),
    ),
    Mutation(
        "hang watch: a data loading process that waits for a disk counts as idle",
        HANGS,
        "for one in _family(given))",
        "for one in [given])",
        (f"test {OF_HANGS} waits_for_a_disk",),
    ),
    Mutation(
        "one writer: the next run has the number of the one before",
        WRITER,
        '.get("number")) + 1',
        '.get("number"))',
        ("test unit/test_single_writer.py released",),
    ),
    Mutation(
        "one writer: who only asks locks out whoever takes the folder",
        WRITER,
        "_lock(folder, descriptor, fcntl.LOCK_SH)",
        "_lock(folder, descriptor)",
        ("test unit/test_single_writer.py nfs",),
    ),
    Mutation(
        "run state: the log is read before it is asked who writes it",
        "report/run_standing.py",
        "    written = is_written(folder)\n    events = _events(folder)",
        "    events = _events(folder)\n    written = is_written(folder)",
        ("test unit/test_status_and_logs.py looked_at",),
    ),
    Mutation(
        "run folder: the step that is gone on from is set aside, too",
        "launch/runfile.py",
        "if step > run.from_step]",
        "if step >= run.from_step]",
        ("test unit/test_runfile.py gives_later_ones_up",),
    ),
    Mutation(
        "checkpoints: one of which files lack counts as the newest",
        FOLDER,
        "(path for path in newest_first(folder) if is_complete(path)), None)",
        "iter(newest_first(folder)), None)",
        ("test unit/test_runfile.py all_damaged",),
    ),
    Mutation(
        "checkpoints: that of this very step is not counted among those to keep",
        FOLDER,
        "if upto is None or step <= upto]",
        "if upto is None or step < upto]",
        (f"test {OF_SAVES} older_ones",),
    ),
    Mutation(
        "checkpoints: it gets its name before its files are sure to be there",
        FOLDER,
        "    sync(written)\n",
        "",
        (f"test {OF_SAVES} synced",),
    ),
    Mutation(
        "checkpoints: what a save left behind is not given its name again",
        FOLDER,
        '    if leftover.suffix != ".old" or not is_folder(leftover) or final.exists():\n        return False\n',
        "    return False\n",
        ("test unit/test_runfile.py moved_aside",),
    ),
    Mutation(
        "checkpoints: the last block of a file is not compared with its checksum",
        "checkpoint/shard_file.py",
        "if crc != self._file.checksums[block]:",
        "if block + 1 < len(self._file.checksums) and crc != self._file.checksums[block]:",
        ("test faults/test_checkpoint_fuzz.py mutated",),
    ),
    Mutation(
        "servers: whoever wants another server is answered",
        "comm/handshake.py",
        "if magic != _MAGIC or asked != identity:",
        "if magic != _MAGIC:",
        ("test unit/test_handshake.py only_those_that_want_it",),
    ),
    Mutation(
        "servers: a caller that the run does not have gets in",
        "comm/listener.py",
        "if stranger.handshake.caller not in self._callers:",
        "if not self._callers:",
        ("test unit/test_handshake.py must_be_the_one",),
    ),
    Mutation(
        "servers: connections that say nothing are held without end",
        "comm/listener.py",
        "while len(self._strangers) >= self._most:",
        "while len(self._strangers) > 4 * self._most:",
        ("test unit/test_handshake.py idle",),
    ),
    Mutation(
        "servers: workers are lost because server 0 was stopped itself",
        REQUESTS,
        "self._skipped = gap > patience.silent and not self._skipped",
        "self._skipped = False",
        (f"test {OF_SERVERS} stop_of_its_own",),
    ),
    Mutation(
        "servers: a piece of a silent worker waits for it",
        QUEUE,
        "for other, piece in self._held.items() if other not in self._silent}",
        "for other, piece in self._held.items()}",
        (f"test {OF_SERVERS} silent_workers_piece",),
    ),
    Mutation(
        "roll call: every start has the same word",
        "comm/roll_call.py",
        "word = uuid4().hex\n    store = _of_start",
        'word = "start"\n    store = _of_start',
        ("test unit/test_point_agreement.py started_again",),
    ),
    Mutation(
        "points that ranks agree on: the least of what was asked",
        "comm/point_agreement.py",
        "numbers = [max(each) for each in zip",
        "numbers = [min(each) for each in zip",
        ("test unit/test_point_agreement.py same_point",),
    ),
)
