/* What a file was when it was mapped, and whether it is still that.

   Who reads behind the new end of a mapped file that was cut off is killed (SIGBUS), and one that was written over gives bytes nobody
   meant to be together. So a reader asks before and after it reads. By name, since a descriptor kept open for each of some thousand
   shards is more than most systems allow; a file that was replaced by another of its name, or removed, is still whole in its
   mapping. */

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

/* Whether the very file that `was` describes has other contents now. */
static inline int file_has_changed(const char *path, const FileState *was) {
    struct stat status;
    FileState now;
    if (stat(path, &status)) return 0;
    file_state_of(&status, &now);
    return now.device == was->device && now.inode == was->inode &&
           (now.nbytes != was->nbytes || now.mtime_ns != was->mtime_ns);
}

#endif
