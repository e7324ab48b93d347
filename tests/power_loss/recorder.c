/* Preloaded into a process: notes every change of files below POWER_LOSS_ROOT, in order, in the file POWER_LOSS_LOG.
   A record is a line "op TAB number TAB number TAB path TAB path NEWLINE", then as many bytes as its first number says. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>


static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;

static void note(const char *op, const void *data, size_t size, long long at, const char *path, const char *other) {
    char head[3 * PATH_MAX];
    if (log_fd < 0)
        log_fd = (int)syscall(SYS_openat, AT_FDCWD, getenv("POWER_LOSS_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    int length = snprintf(head, sizeof head, "%s\t%zu\t%lld\t%s\t%s\n", op, size, at, path, other ? other : "");
    syscall(SYS_write, log_fd, head, (size_t)length);
    if (size) syscall(SYS_write, log_fd, data, size);
}

static int below(const char *path) {
    const char *root = getenv("POWER_LOSS_ROOT");
    size_t length = root ? strlen(root) : 0;
    return length && strncmp(path, root, length) == 0 && (path[length] == '/' || path[length] == 0);
}

/* The path that a name means from a folder; 0 where it is none of ours. */
static int placed(int folder, const char *name, char *path) {
    if (name[0] == '/' ) snprintf(path, PATH_MAX, "%s", name);
    else {
        char link[64], base[PATH_MAX];
        if (folder == AT_FDCWD) { if (!getcwd(base, sizeof base)) return 0; }
        else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            ssize_t got = readlink(link, base, sizeof base - 1);
            if (got < 0) return 0;
            base[got] = 0;
        }
        snprintf(path, PATH_MAX, "%.2000s/%.2000s", base, name);
    }
    return below(path);
}

static int of_fd(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t got = readlink(link, path, PATH_MAX - 1);
    if (got <= 0 || path[0] != '/') return 0;
    path[got] = 0;
    return below(path);
}

static int opened(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    int ours = (flags & (O_CREAT | O_TRUNC)) && placed(folder, name, path);
    if (!ours) return (int)syscall(SYS_openat, folder, name, flags, mode);
    pthread_mutex_lock(&order);
    struct stat before;
    int known = stat(path, &before) == 0;
    int fd = (int)syscall(SYS_openat, folder, name, flags, mode);
    if (fd >= 0 && !known) note("create", 0, 0, 0, path, 0);
    else if (fd >= 0 && (flags & O_TRUNC)) note("truncate", 0, 0, 0, path, 0);
    int kept = errno;
    pthread_mutex_unlock(&order);
    errno = kept;
    return fd;
}

#define MODE mode_t mode = 0; if (flags & (O_CREAT | __O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }
int open(const char *name, int flags, ...) { MODE return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE return opened(AT_FDCWD, name, flags | O_LARGEFILE, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE return opened(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE return opened(folder, name, flags | O_LARGEFILE, mode); }

/* Run a call, and note it in the same order where it changed something of ours. */
#define NOTED(type, call, noted) \
    pthread_mutex_lock(&order); type done = (call); int kept = errno; if (done >= 0) { noted; } \
    pthread_mutex_unlock(&order); errno = kept; return done;

ssize_t write(int fd, const void *data, size_t size) {
    char path[PATH_MAX];
    if (!of_fd(fd, path)) return syscall(SYS_write, fd, data, size);
    NOTED(ssize_t, syscall(SYS_write, fd, data, size),
          note("write", data, (size_t)done, syscall(SYS_lseek, fd, 0, SEEK_CUR) - done, path, 0))
}
static ssize_t placed_write(int fd, const void *data, size_t size, off_t at) {
    char path[PATH_MAX];
    if (!of_fd(fd, path)) return syscall(SYS_pwrite64, fd, data, size, at);
    NOTED(ssize_t, syscall(SYS_pwrite64, fd, data, size, at), note("write", data, (size_t)done, at, path, 0))
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return placed_write(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) { return placed_write(fd, data, size, at); }
static int cut(int fd, off_t size) {
    char path[PATH_MAX];
    if (!of_fd(fd, path)) return (int)syscall(SYS_ftruncate, fd, size);
    NOTED(int, (int)syscall(SYS_ftruncate, fd, size), note("truncate", 0, 0, size, path, 0))
}
int ftruncate(int fd, off_t size) { return cut(fd, size); }
int ftruncate64(int fd, off_t size) { return cut(fd, size); }
int fsync(int fd) {
    char path[PATH_MAX];
    if (!of_fd(fd, path)) return (int)syscall(SYS_fsync, fd);
    NOTED(int, 0, note("sync", 0, 0, 0, path, 0)) /* the disk of the test need not wait */
}
int fdatasync(int fd) { return fsync(fd); }

static int moved(int from, const char *old, int to, const char *new) {
    char path[PATH_MAX], other[PATH_MAX];
    int ours = placed(from, old, path) && placed(to, new, other);
    NOTED(int, (int)syscall(SYS_renameat2, from, old, to, new, 0), if (ours) note("rename", 0, 0, 0, path, other))
}
int rename(const char *old, const char *new) { return moved(AT_FDCWD, old, AT_FDCWD, new); }
int renameat(int from, const char *old, int to, const char *new) { return moved(from, old, to, new); }

int mkdirat(int folder, const char *name, mode_t mode) {
    char path[PATH_MAX];
    int ours = placed(folder, name, path);
    NOTED(int, (int)syscall(SYS_mkdirat, folder, name, mode), if (ours) note("mkdir", 0, 0, 0, path, 0))
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

int unlinkat(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    int ours = placed(folder, name, path);
    NOTED(int, (int)syscall(SYS_unlinkat, folder, name, flags), if (ours) note("remove", 0, 0, 0, path, 0))
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
int remove(const char *name) {
    struct stat what;
    return lstat(name, &what) == 0 && S_ISDIR(what.st_mode) ? rmdir(name) : unlink(name);
}

/* Copies inside the kernel would pass by: callers fall back to writes. */
ssize_t sendfile(int to, int from, off_t *at, size_t size) { (void)to; (void)from; (void)at; (void)size; errno = ENOSYS; return -1; }
ssize_t sendfile64(int to, int from, off_t *at, size_t size) { return sendfile(to, from, at, size); }
