/* The state of a file when it was mapped, and whether it has changed.

   Reading a mapped file past the end to which it was truncated kills the process (SIGBUS), and a file that was overwritten gives
   a mix of old and new bytes. So a reader checks before and after it reads. It checks by name, because an open descriptor for
   each of some thousand shards is more than most systems allow; a file that was replaced by another of its name, or removed, is
   still complete in its mapping. */

#ifndef SHMLOAD_FILE_STATE_H
#define SHMLOAD_FILE_STATE_H

#include <stdint.h>
#include <sys/stat.h>

typedef struct {
    uint64_t device, inode;
    int64_t nbytes;
    int64_t mtime_ns; /* when the contents last changed */
} FileState;

static inline void file_state_of(const struct stat *status, FileState *state) {
    state->device = (uint64_t)status->st_dev;
    state->inode = (uint64_t)status->st_ino;
    state->nbytes = (int64_t)status->st_size;
    state->mtime_ns = (int64_t)status->st_mtim.tv_sec * 1000000000 + status->st_mtim.tv_nsec;
}

/* Return whether the same file that `was` describes has other contents now. */
static inline int file_has_changed(const char *path, const FileState *was) {
    struct stat status;
    FileState now;
    if (stat(path, &status)) return 0;
    file_state_of(&status, &now);
    return now.device == was->device && now.inode == was->inode &&
           (now.nbytes != was->nbytes || now.mtime_ns != was->mtime_ns);
}

#endif
