/* Counts the operations that change files below one folder, and fails the N-th of them.
 *
 * Preloaded into a Python process (LD_PRELOAD), it passes everything through until shim_arm().
 * What happened is written into memory that the caller shares with its parent, since a process
 * that is killed cannot tell.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum mode {
    COUNT,
    KILL_BEFORE,
    KILL_AFTER,
    TORN,
    EIO_ONCE,
    FULL,
    SHORT,
    CUT_BEFORE, /* the power, with nothing in the journal but what was flushed */
    CUT_AFTER,
    CUT_BEFORE_COMMIT, /* the journal was just committed for a bystander's sake: names without data */
    CUT_AFTER_COMMIT
};
enum kind { CHANGES = 1, GROWS = 2, WRITES = 4 };
enum deed { PASS, THEN_DIE, HALF_THEN_DIE, HALF, FAIL };

struct report {
    long seen; /* operations that count in this mode */
    long met;  /* whether the fault was met */
    char what[512];
};

static char watched[4096];
static size_t watched_length;
static int mode, real_sync, mount = -1;
static long at;
static volatile int armed;
static struct report *report;

static void commit_for_a_bystander(void)
{
    static int (*real)(int);
    if (!real)
        real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    if (futimens(mount, NULL) || real(mount))
        snprintf(report->what, sizeof report->what, "no power cut: no commit");
}

static void die(void)
{
    if (mode >= CUT_BEFORE_COMMIT)
        commit_for_a_bystander();
    if (mode >= CUT_BEFORE) {
        unsigned no_log_flush = 2;
        if (ioctl(mount, 0x8004587d, &no_log_flush)) /* EXT4_IOC_SHUTDOWN */
            snprintf(report->what, sizeof report->what, "no power cut: %s", strerror(errno));
    }
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

void shim_arm(const char *folder, int how, long number, int sync_for_real, int mount_fd, void *page)
{
    snprintf(watched, sizeof watched, "%s", folder);
    watched_length = strlen(watched);
    mode = how, at = number, real_sync = sync_for_real, mount = mount_fd, report = page;
    report->seen = report->met = 0;
    report->what[0] = 0;
    armed = 1;
}

void shim_disarm(void) { armed = 0; }

void shim_die(void)
{
    report->met = 1;
    snprintf(report->what, sizeof report->what, "at the end");
    die();
}

static int below(const char *path)
{
    return !strncmp(path, watched, watched_length) &&
           (path[watched_length] == '/' || !path[watched_length]);
}

static void path_of(int fd, char *place, size_t size)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, place, size - 1);
    place[length < 0 ? 0 : length] = 0;
}

static int counts(int kind)
{
    switch (mode) {
    case TORN:
    case SHORT:
        return kind & WRITES;
    case FULL:
        return kind & GROWS;
    default:
        return 1;
    }
}

static enum deed deed_of(void)
{
    switch (mode) {
    case KILL_BEFORE:
    case CUT_BEFORE:
    case CUT_BEFORE_COMMIT:
        die();
        return PASS;
    case KILL_AFTER:
    case CUT_AFTER:
    case CUT_AFTER_COMMIT:
        return THEN_DIE;
    case TORN:
        return HALF_THEN_DIE;
    case SHORT:
        return HALF;
    case EIO_ONCE:
        errno = EIO;
        return FAIL;
    case FULL:
        errno = ENOSPC;
        return FAIL;
    default:
        return PASS;
    }
}

static enum deed meet(const char *operation, int kind, int folder, const char *name)
{
    char place[4096];
    if (!armed)
        return PASS;
    int before = errno;
    if (name && name[0] == '/')
        snprintf(place, sizeof place, "%s", name);
    else {
        if (folder == AT_FDCWD) {
            if (!getcwd(place, sizeof place))
                place[0] = 0;
        } else
            path_of(folder, place, sizeof place);
        size_t length = strlen(place);
        if (name)
            snprintf(place + length, sizeof place - length, "/%s", name);
    }
    errno = before;
    if (!below(place) || !counts(kind))
        return PASS;
    long number = __sync_fetch_and_add(&report->seen, 1);
    if (number != at && !(mode == FULL && number > at))
        return PASS;
    if (!report->met)
        snprintf(report->what, sizeof report->what, "%s %.400s", operation,
                 place + watched_length);
    report->met = 1;
    return deed_of();
}

#define REAL(type, name, ...)                                                                      \
    static type (*real)(__VA_ARGS__);                                                              \
    if (!real)                                                                                     \
        real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

/* An operation that is done or not, never by half. */
#define WHOLE(kind, operation, folder, path, call)                                                 \
    enum deed deed = meet(operation, kind, folder, path);                                          \
    if (deed == FAIL)                                                                              \
        return -1;                                                                                 \
    int answer = call;                                                                             \
    if (deed == THEN_DIE)                                                                          \
        die();                                                                                     \
    return answer

/* An operation on `size` bytes, of which half may be done. */
#define PARTIAL(operation, fd, size, whole, half)                                                  \
    enum deed deed = meet(operation, CHANGES | GROWS | WRITES, fd, NULL);                          \
    if (deed == FAIL)                                                                              \
        return -1;                                                                                 \
    ssize_t answer = (deed == HALF || deed == HALF_THEN_DIE) && (size) > 1 ? half : whole;         \
    if (deed == THEN_DIE || deed == HALF_THEN_DIE)                                                 \
        die();                                                                                     \
    return answer

static int open_kind(int flags) { return flags & O_CREAT ? CHANGES | GROWS : CHANGES; }

#define OPEN(symbol)                                                                               \
    int symbol(const char *path, int flags, ...)                                                   \
    {                                                                                              \
        REAL(int, #symbol, const char *, int, ...);                                                \
        va_list words;                                                                             \
        va_start(words, flags);                                                                    \
        mode_t bits = va_arg(words, mode_t);                                                       \
        va_end(words);                                                                             \
        if (!(flags & (O_CREAT | O_TRUNC)))                                                        \
            return real(path, flags, bits);                                                        \
        WHOLE(open_kind(flags), "open", AT_FDCWD, path, real(path, flags, bits));                  \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(symbol)                                                                             \
    int symbol(int folder, const char *path, int flags, ...)                                       \
    {                                                                                              \
        REAL(int, #symbol, int, const char *, int, ...);                                           \
        va_list words;                                                                             \
        va_start(words, flags);                                                                    \
        mode_t bits = va_arg(words, mode_t);                                                       \
        va_end(words);                                                                             \
        if (!(flags & (O_CREAT | O_TRUNC)))                                                        \
            return real(folder, path, flags, bits);                                                \
        WHOLE(open_kind(flags), "open", folder, path, real(folder, path, flags, bits));            \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int fd, const void *from, size_t size)
{
    REAL(ssize_t, "write", int, const void *, size_t);
    PARTIAL("write", fd, size, real(fd, from, size), real(fd, from, size / 2));
}

#define PWRITE(symbol)                                                                             \
    ssize_t symbol(int fd, const void *from, size_t size, off_t place)                             \
    {                                                                                              \
        REAL(ssize_t, #symbol, int, const void *, size_t, off_t);                                  \
        PARTIAL("pwrite", fd, size, real(fd, from, size, place), real(fd, from, size / 2, place)); \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    PARTIAL("writev", fd, count, real(fd, parts, count), real(fd, parts, count / 2));
}

#define SENDFILE(symbol)                                                                           \
    ssize_t symbol(int to, int from, off_t *place, size_t size)                                    \
    {                                                                                              \
        REAL(ssize_t, #symbol, int, int, off_t *, size_t);                                         \
        PARTIAL("sendfile", to, size, real(to, from, place, size),                                 \
                real(to, from, place, size / 2));                                                  \
    }
SENDFILE(sendfile)
SENDFILE(sendfile64)

ssize_t copy_file_range(int from, off_t *a, int to, off_t *b, size_t size, unsigned flags)
{
    REAL(ssize_t, "copy_file_range", int, off_t *, int, off_t *, size_t, unsigned);
    PARTIAL("copy_file_range", to, size, real(from, a, to, b, size, flags),
            real(from, a, to, b, size / 2, flags));
}

#define SYNC(symbol)                                                                               \
    int symbol(int fd)                                                                             \
    {                                                                                              \
        REAL(int, #symbol, int);                                                                   \
        WHOLE(CHANGES | GROWS, #symbol, fd, NULL, armed && !real_sync ? 0 : real(fd));             \
    }
SYNC(fsync)
SYNC(fdatasync)

#define TRUNCATE(symbol)                                                                           \
    int symbol(int fd, off_t size)                                                                 \
    {                                                                                              \
        REAL(int, #symbol, int, off_t);                                                            \
        WHOLE(CHANGES, "ftruncate", fd, NULL, real(fd, size));                                     \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

int rename(const char *from, const char *to)
{
    REAL(int, "rename", const char *, const char *);
    WHOLE(CHANGES | GROWS, "rename", AT_FDCWD, to, real(from, to));
}

int renameat(int a, const char *from, int b, const char *to)
{
    REAL(int, "renameat", int, const char *, int, const char *);
    WHOLE(CHANGES | GROWS, "rename", b, to, real(a, from, b, to));
}

int renameat2(int a, const char *from, int b, const char *to, unsigned flags)
{
    REAL(int, "renameat2", int, const char *, int, const char *, unsigned);
    WHOLE(CHANGES | GROWS, "rename", b, to, real(a, from, b, to, flags));
}

int unlink(const char *path)
{
    REAL(int, "unlink", const char *);
    WHOLE(CHANGES, "unlink", AT_FDCWD, path, real(path));
}

int unlinkat(int folder, const char *path, int flags)
{
    REAL(int, "unlinkat", int, const char *, int);
    WHOLE(CHANGES, flags & AT_REMOVEDIR ? "rmdir" : "unlink", folder, path,
          real(folder, path, flags));
}

int rmdir(const char *path)
{
    REAL(int, "rmdir", const char *);
    WHOLE(CHANGES, "rmdir", AT_FDCWD, path, real(path));
}

int remove(const char *path)
{
    REAL(int, "remove", const char *);
    WHOLE(CHANGES, "remove", AT_FDCWD, path, real(path));
}

int mkdir(const char *path, mode_t bits)
{
    REAL(int, "mkdir", const char *, mode_t);
    WHOLE(CHANGES | GROWS, "mkdir", AT_FDCWD, path, real(path, bits));
}

int mkdirat(int folder, const char *path, mode_t bits)
{
    REAL(int, "mkdirat", int, const char *, mode_t);
    WHOLE(CHANGES | GROWS, "mkdir", folder, path, real(folder, path, bits));
}

int link(const char *from, const char *to)
{
    REAL(int, "link", const char *, const char *);
    WHOLE(CHANGES | GROWS, "link", AT_FDCWD, to, real(from, to));
}

int linkat(int a, const char *from, int b, const char *to, int flags)
{
    REAL(int, "linkat", int, const char *, int, const char *, int);
    WHOLE(CHANGES | GROWS, "link", b, to, real(a, from, b, to, flags));
}

int symlink(const char *target, const char *path)
{
    REAL(int, "symlink", const char *, const char *);
    WHOLE(CHANGES | GROWS, "symlink", AT_FDCWD, path, real(target, path));
}

int symlinkat(const char *target, int folder, const char *path)
{
    REAL(int, "symlinkat", const char *, int, const char *);
    WHOLE(CHANGES | GROWS, "symlink", folder, path, real(target, folder, path));
}

int fchmod(int fd, mode_t bits)
{
    REAL(int, "fchmod", int, mode_t);
    WHOLE(CHANGES, "fchmod", fd, NULL, real(fd, bits));
}
