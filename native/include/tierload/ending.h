// How a process ends while saves are in flight: what SIGTERM does, and the status of an exit after a failure.
//
// Everything here is about the calling process alone. In a forked child it is as if nothing of it had ever been called,
// whatever its parent has in flight, until the child calls it itself. All functions may be called by any thread.
#pragma once

#include <cstdint>
#include <string>

namespace tierload {

// SIGTERM waits for the saves that are in flight when it comes, for up to `grace_seconds`, and then ends the process as
// it would have without us; a second one ends it at once. Without a save in flight the first one does.
//
// It works from C: the threads of the program may all be in long calls. Each call looks at the disposition of SIGTERM
// anew and takes it over only where it is the default one: a handler that somebody installed, before or after, is all
// that happens (a normal exit waits for the saves by itself), and what is ignored stays ignored.
void watch_termination(double grace_seconds);

// Whether SIGTERM has come and the process ends when its saves have.
bool terminating();

// What is in flight. `what` is for the message: "the save of step 200 into runs/gpt".
void save_begins(uint64_t id, const std::string& what);
void save_ends(uint64_t id);

// From now on an exit with status 0 becomes one with status 1; other statuses stay. It holds for every way to exit()
// (the end of a script, sys.exit), but not for _exit (os._exit, a forked multiprocessing worker) or a signal.
void fail_exit();
void forgive_exit();

}  // namespace tierload
