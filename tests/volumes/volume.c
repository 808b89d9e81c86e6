/*
 * A FUSE file system over a folder, which refuses, lags and fails as Unity Catalog volumes are reported to.
 *
 * usage: volume BACKING MOUNT_POINT OWNER_PID THREADS
 *
 * Commands come as lines on standard input, each answered by one on standard output; see obey(). The end of standard
 * input, or the death of the owner, unmounts.
 */

#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#define FUSE_USE_VERSION 312

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse_lowlevel.h>
#include <limits.h>
#include <linux/fuse.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* ---- Settings, counters and faults ---- */

enum setting {
    OPEN_US, STAT_US, LIST_US, BYTES_PER_S, CACHE_MS, LISTING_LAG_MS, LOOKUP_LAG_MS, CAPACITY_BYTES, FREE_BYTES,
    REFUSE_TIMES, SETTINGS
};
static const char *const setting_names[SETTINGS] = {
    "open_us", "stat_us", "list_us", "bytes_per_s", "cache_ms", "listing_lag_ms", "lookup_lag_ms", "capacity_bytes",
    "free_bytes", "refuse_times",
};
static atomic_llong settings[SETTINGS];

enum counter { OPENS, CREATES, STATS, LISTINGS, READS, BYTES_READ, WRITES, BYTES_WRITTEN, DELETES, COUNTERS };
static const char *const counter_names[COUNTERS] = {
    "opens", "creates", "stats", "listings", "reads", "bytes_read", "writes", "bytes_written", "deletes",
};
static atomic_llong counters[COUNTERS];

enum fault_kind { EIO_OPEN, EIO_READ, EIO_WRITE, EIO_STAT, EIO_LIST, EIO_CLOSE, EIO_DELETE, SLOW, FAULT_KINDS };
static const char *const fault_names[FAULT_KINDS] = {
    "eio_open", "eio_read", "eio_write", "eio_stat", "eio_list", "eio_close", "eio_delete", "slow",
};

struct fault {
    enum fault_kind kind;
    long long times;      /* how often it is still to happen; negative: for ever */
    char match[PATH_MAX]; /* bytes that the path contains */
    size_t match_length;
    long long bytes_per_s, latency_us; /* of SLOW only */
};
static struct fault faults[64];
static atomic_int fault_count;
static pthread_mutex_t fault_lock = PTHREAD_MUTEX_INITIALIZER;

static void count(enum counter counter, long long by) {
    atomic_fetch_add(&counters[counter], by);
}

static long long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void sleep_until(long long ns) {
    struct timespec until = {.tv_sec = ns / 1000000000LL, .tv_nsec = ns % 1000000000LL};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
        continue;
}

static void sleep_us(long long us) {
    if (us > 0)
        sleep_until(now_ns() + us * 1000);
}

/* Find what applies to the path, and use up one of its times if `take`. */
static bool find_fault(enum fault_kind kind, const char *path, bool take, struct fault *found) {
    if (!atomic_load(&fault_count))
        return false;
    bool any = false;
    pthread_mutex_lock(&fault_lock);
    for (int i = 0; i < atomic_load(&fault_count) && !any; i++) {
        struct fault *fault = &faults[i];
        if (fault->kind != kind || !fault->times || !memmem(path, strlen(path), fault->match, fault->match_length))
            continue;
        if (take && fault->times > 0)
            fault->times--;
        if (found)
            *found = *fault;
        any = true;
    }
    pthread_mutex_unlock(&fault_lock);
    return any;
}

static bool fails(enum fault_kind kind, const char *path) {
    return find_fault(kind, path, true, NULL);
}

/* ---- Nodes: one for each file or folder that was named; never freed, since a mount lives as long as a test ---- */

enum { NOT_CREATED_HERE = 0, BEING_WRITTEN = -1 };

struct node {
    char *path; /* from the root of the volume; nothing is ever renamed */
    ino_t inode;
    atomic_bool is_gone;
    long long created_ns;  /* when it was closed for the first time, or one of the two above */
    long long stored;      /* bytes written through the mount that deletion gives back */
    long long reader_opens;
    struct node *next, *next_of_all;
};

enum { BUCKETS = 1 << 16 };
static struct node *buckets[BUCKETS];
static struct node *all_nodes;
static struct node root_node = {.path = ""};
static long long stored_total;
static pthread_mutex_t node_lock = PTHREAD_MUTEX_INITIALIZER; /* guards all of the above, and the fields of nodes */
static int root;

static struct node **bucket_of(const char *path) {
    unsigned hash = 2166136261u;
    for (; *path; path++)
        hash = (hash ^ (unsigned char)*path) * 16777619u;
    return &buckets[hash % BUCKETS];
}

static struct node *node_of(fuse_ino_t ino) {
    return ino == FUSE_ROOT_ID ? &root_node : (struct node *)(uintptr_t)ino;
}

static char *join(fuse_ino_t parent, const char *name) {
    const char *folder = node_of(parent)->path;
    char *path;
    if (asprintf(&path, "%s%s%s", folder, *folder ? "/" : "", name) < 0)
        abort();
    return path;
}

/* The path as the *at calls take it. */
static const char *at(const struct node *node) {
    return *node->path ? node->path : ".";
}

static struct node *find_node_locked(const char *path) {
    struct node *node = *bucket_of(path);
    while (node && strcmp(node->path, path))
        node = node->next;
    return node;
}

static void give_room_back_locked(struct node *node) {
    stored_total -= node->stored;
    node->stored = 0;
}

/* Forget the name: what is created under it next is another file, also to those who hold the old one open. */
static void detach_locked(struct node *node) {
    struct node **link = bucket_of(node->path);
    while (*link != node)
        link = &(*link)->next;
    *link = node->next;
    node->is_gone = true;
    give_room_back_locked(node);
}

static void detach(const char *path) {
    pthread_mutex_lock(&node_lock);
    struct node *node = find_node_locked(path);
    if (node)
        detach_locked(node);
    pthread_mutex_unlock(&node_lock);
}

static struct node *obtain_node(const char *path, ino_t inode) {
    pthread_mutex_lock(&node_lock);
    struct node *node = find_node_locked(path);
    if (node && node->inode != inode) { /* replaced behind the mount */
        detach_locked(node);
        node = NULL;
    }
    if (!node) {
        node = calloc(1, sizeof *node);
        if (!node || !(node->path = strdup(path)))
            abort();
        node->inode = inode;
        struct node **bucket = bucket_of(path);
        node->next = *bucket;
        *bucket = node;
        node->next_of_all = all_nodes;
        all_nodes = node;
    }
    pthread_mutex_unlock(&node_lock);
    return node;
}

static void set_created(struct node *node, long long created_ns) {
    pthread_mutex_lock(&node_lock);
    node->created_ns = created_ns;
    pthread_mutex_unlock(&node_lock);
}

static bool is_hidden_locked(const struct node *node, enum setting lag) {
    long long ms = atomic_load(&settings[lag]);
    if (ms <= 0 || node->created_ns == NOT_CREATED_HERE)
        return false;
    return node->created_ns == BEING_WRITTEN || now_ns() < node->created_ns + ms * 1000000;
}

static bool is_listed(const struct node *folder, const char *name) {
    if (atomic_load(&settings[LISTING_LAG_MS]) <= 0)
        return true;
    char *path = join(folder == &root_node ? FUSE_ROOT_ID : (fuse_ino_t)(uintptr_t)folder, name);
    pthread_mutex_lock(&node_lock);
    struct node *node = find_node_locked(path);
    bool listed = !node || !is_hidden_locked(node, LISTING_LAG_MS);
    pthread_mutex_unlock(&node_lock);
    free(path);
    return listed;
}

/* ---- Looking things up ---- */

/* With cache_ms=0 the kernel asks for each name of a path again at each call. What it is told then holds for a moment
   all the same, or it would ask a second time to answer one and the same stat. */
static double attr_timeout(void) {
    long long ms = atomic_load(&settings[CACHE_MS]);
    return ms > 0 ? ms / 1e3 : 0.05;
}

static int fill_entry(const char *path, struct fuse_entry_param *entry) {
    memset(entry, 0, sizeof *entry);
    if (fstatat(root, path, &entry->attr, AT_SYMLINK_NOFOLLOW)) {
        int error = errno;
        if (error == ENOENT)
            detach(path);
        return error;
    }
    entry->ino = (uintptr_t)obtain_node(path, entry->attr.st_ino);
    entry->attr_timeout = attr_timeout();
    /* a name that the kernel remembers would defeat the lag of lookups */
    entry->entry_timeout = atomic_load(&settings[LOOKUP_LAG_MS]) > 0 ? 0 : atomic_load(&settings[CACHE_MS]) / 1e3;
    return 0;
}

static void volume_lookup(fuse_req_t request, fuse_ino_t parent, const char *name) {
    char *path = join(parent, name);
    struct fuse_entry_param entry;
    count(STATS, 1);
    sleep_us(atomic_load(&settings[STAT_US]));
    int error = fails(EIO_STAT, path) ? EIO : fill_entry(path, &entry);
    if (!error && S_ISREG(entry.attr.st_mode)) { /* folders are spared: makedirs could not work */
        pthread_mutex_lock(&node_lock);
        if (is_hidden_locked(node_of(entry.ino), LOOKUP_LAG_MS))
            error = ENOENT;
        pthread_mutex_unlock(&node_lock);
    }
    error ? fuse_reply_err(request, error) : fuse_reply_entry(request, &entry);
    free(path);
}

/* ---- Open files ---- */

struct handle {
    int fd;
    struct node *node;
    bool writes, creates;
    bool keeps; /* bytes that were there before: nothing may be written until they are cut off */
    off_t end;  /* of what this handle has written */
    long long free_at_ns;
    pthread_mutex_t lock;
};

static struct handle *handle_of(const struct fuse_file_info *file) {
    return (struct handle *)(uintptr_t)file->fh;
}

/* Sleep for as long as the bytes take, after those that the handle is already moving. */
static void pace(struct handle *handle, long long bytes, long long bytes_per_s) {
    if (bytes_per_s <= 0 || bytes <= 0)
        return;
    pthread_mutex_lock(&handle->lock);
    long long now = now_ns();
    handle->free_at_ns = handle->free_at_ns > now ? handle->free_at_ns : now;
    handle->free_at_ns += (long long)((double)bytes * 1e9 / (double)bytes_per_s);
    long long until = handle->free_at_ns;
    pthread_mutex_unlock(&handle->lock);
    sleep_until(until);
}

static void cut_off(struct node *node, struct handle *handle) {
    pthread_mutex_lock(&node_lock);
    give_room_back_locked(node);
    pthread_mutex_unlock(&node_lock);
    if (handle) {
        handle->end = 0;
        handle->keeps = false;
    }
}

static void volume_getattr(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file) {
    struct node *node = node_of(ino);
    struct stat attr;
    int error = 0;
    if (file) { /* the kernel refreshing the size while it reads, which no caller asked for */
        error = fstat(handle_of(file)->fd, &attr) ? errno : 0;
    } else {
        count(STATS, 1);
        sleep_us(atomic_load(&settings[STAT_US]));
        if (fails(EIO_STAT, node->path))
            error = EIO;
        else if (node->is_gone)
            error = ENOENT;
        else
            error = fstatat(root, at(node), &attr, AT_SYMLINK_NOFOLLOW) ? errno : 0;
    }
    error ? fuse_reply_err(request, error) : fuse_reply_attr(request, &attr, attr_timeout());
}

static int change_size(struct node *node, off_t size, struct handle *handle) {
    if (size)
        return EOPNOTSUPP;
    int fd = handle ? handle->fd : openat(root, node->path, O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return errno;
    int error = ftruncate(fd, 0) ? errno : 0;
    if (!error)
        cut_off(node, handle);
    if (!handle)
        close(fd);
    return error;
}

static int change_times(struct node *node, const struct stat *attr, int changes) {
    if (atomic_load(&settings[REFUSE_TIMES]))
        return ENOSYS;
    struct timespec times[2] = {attr->st_atim, attr->st_mtim};
    if (!(changes & FUSE_SET_ATTR_ATIME))
        times[0].tv_nsec = UTIME_OMIT;
    else if (changes & FUSE_SET_ATTR_ATIME_NOW)
        times[0].tv_nsec = UTIME_NOW;
    if (!(changes & FUSE_SET_ATTR_MTIME))
        times[1].tv_nsec = UTIME_OMIT;
    else if (changes & FUSE_SET_ATTR_MTIME_NOW)
        times[1].tv_nsec = UTIME_NOW;
    return utimensat(root, at(node), times, AT_SYMLINK_NOFOLLOW) ? errno : 0;
}

static void volume_setattr(fuse_req_t request, fuse_ino_t ino, struct stat *attr, int changes,
                           struct fuse_file_info *file) {
    struct node *node = node_of(ino);
    struct stat now;
    int error = 0; /* a change of mode or owner is accepted, and has no effect */
    if (changes & FUSE_SET_ATTR_SIZE) /* which brings the times with it */
        error = change_size(node, attr->st_size, file ? handle_of(file) : NULL);
    else if (changes & (FUSE_SET_ATTR_ATIME | FUSE_SET_ATTR_MTIME))
        error = change_times(node, attr, changes);
    if (!error && fstatat(root, at(node), &now, AT_SYMLINK_NOFOLLOW))
        error = errno;
    error ? fuse_reply_err(request, error) : fuse_reply_attr(request, &now, attr_timeout());
}

static void give_handle(struct fuse_file_info *file, struct node *node, struct handle handle) {
    struct handle *kept = malloc(sizeof *kept);
    if (!kept)
        abort();
    *kept = handle;
    kept->node = node;
    kept->writes = (file->flags & O_ACCMODE) != O_RDONLY;
    pthread_mutex_init(&kept->lock, NULL);
    file->fh = (uintptr_t)kept;
    /* through the page cache the kernel may try a failed read twice, and a caller would see fewer faults than set */
    file->direct_io = find_fault(EIO_READ, node->path, false, NULL);
}

static int open_existing(const char *path, struct node *node, struct fuse_file_info *file) {
    bool truncates = file->flags & O_TRUNC;
    int fd = openat(root, path, (file->flags & O_ACCMODE) | O_NOFOLLOW | O_CLOEXEC);
    struct stat attr;
    if (fd < 0)
        return errno;
    int error = fstat(fd, &attr) ? errno : 0;
    if (!error && (file->flags & O_ACCMODE) == O_RDWR && attr.st_size && !truncates)
        error = EOPNOTSUPP;
    if (!error && truncates && ftruncate(fd, 0))
        error = errno;
    if (error) {
        close(fd);
        return error;
    }
    if (!node)
        node = obtain_node(path, attr.st_ino);
    if (truncates)
        cut_off(node, NULL);
    if ((file->flags & O_ACCMODE) != O_WRONLY) {
        pthread_mutex_lock(&node_lock);
        node->reader_opens++;
        pthread_mutex_unlock(&node_lock);
    }
    give_handle(file, node, (struct handle){.fd = fd, .keeps = attr.st_size && !truncates});
    return 0;
}

static void volume_open(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file) {
    struct node *node = node_of(ino);
    count(OPENS, 1);
    sleep_us(atomic_load(&settings[OPEN_US]));
    int error = 0;
    if (fails(EIO_OPEN, node->path))
        error = EIO;
    else if (file->flags & O_APPEND)
        error = EOPNOTSUPP;
    else if (node->is_gone)
        error = ENOENT;
    else
        error = open_existing(node->path, node, file);
    error ? fuse_reply_err(request, error) : fuse_reply_open(request, file);
}

static int create(const char *path, mode_t mode, struct fuse_file_info *file) {
    if (fails(EIO_OPEN, path))
        return EIO;
    if (file->flags & O_APPEND)
        return EOPNOTSUPP;
    int flags = (file->flags & O_ACCMODE) | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    int fd = openat(root, path, flags, mode);
    if (fd < 0 && errno == EEXIST && !(file->flags & O_EXCL)) /* hidden by the lag, or made by another at this moment */
        return open_existing(path, NULL, file);
    struct stat attr;
    if (fd < 0 || fstat(fd, &attr))
        return errno;
    struct node *node = obtain_node(path, attr.st_ino);
    set_created(node, BEING_WRITTEN);
    give_handle(file, node, (struct handle){.fd = fd, .creates = true});
    return 0;
}

static void volume_create(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode,
                          struct fuse_file_info *file) {
    char *path = join(parent, name);
    struct fuse_entry_param entry;
    count(CREATES, 1);
    sleep_us(atomic_load(&settings[OPEN_US]));
    int error = create(path, mode, file);
    if (!error && (error = fill_entry(path, &entry))) { /* deleted at once behind the mount */
        close(handle_of(file)->fd);
        free(handle_of(file));
    }
    error ? fuse_reply_err(request, error) : fuse_reply_create(request, &entry, file);
    free(path);
}

static void volume_read(fuse_req_t request, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *file) {
    (void)ino;
    struct handle *handle = handle_of(file);
    struct fault slow = {.bytes_per_s = 0};
    count(READS, 1);
    if (fails(EIO_READ, handle->node->path)) {
        fuse_reply_err(request, EIO);
        return;
    }
    char *bytes = malloc(size);
    ssize_t got = bytes ? pread(handle->fd, bytes, size, offset) : -1;
    int error = errno;
    if (got >= 0) {
        count(BYTES_READ, got);
        bool is_slow = find_fault(SLOW, handle->node->path, true, &slow);
        sleep_us(slow.latency_us);
        pace(handle, got, is_slow && slow.bytes_per_s ? slow.bytes_per_s : atomic_load(&settings[BYTES_PER_S]));
        fuse_reply_buf(request, bytes, (size_t)got);
    } else {
        fuse_reply_err(request, error);
    }
    free(bytes);
}

static bool take_room(struct node *node, long long bytes) {
    pthread_mutex_lock(&node_lock);
    long long capacity = atomic_load(&settings[CAPACITY_BYTES]);
    bool fits = node->is_gone || capacity <= 0 || stored_total + bytes <= capacity;
    if (fits && !node->is_gone) {
        stored_total += bytes;
        node->stored += bytes;
    }
    pthread_mutex_unlock(&node_lock);
    return fits;
}

static int append(struct handle *handle, const char *bytes, size_t size, off_t offset) {
    if (fails(EIO_WRITE, handle->node->path))
        return EIO;
    if (handle->keeps || offset != handle->end)
        return EOPNOTSUPP;
    if (!take_room(handle->node, (long long)size))
        return ENOSPC;
    for (size_t done = 0; done < size;) {
        ssize_t wrote = pwrite(handle->fd, bytes + done, size - done, offset + (off_t)done);
        if (wrote < 0)
            return errno;
        done += (size_t)wrote;
    }
    handle->end += (off_t)size;
    return 0;
}

static void volume_write(fuse_req_t request, fuse_ino_t ino, const char *bytes, size_t size, off_t offset,
                         struct fuse_file_info *file) {
    (void)ino;
    struct handle *handle = handle_of(file);
    int error = append(handle, bytes, size, offset); /* the kernel sends the writes to one file one by one */
    count(WRITES, 1);
    if (error) {
        fuse_reply_err(request, error);
        return;
    }
    count(BYTES_WRITTEN, (long long)size);
    pace(handle, (long long)size, atomic_load(&settings[BYTES_PER_S]));
    fuse_reply_write(request, size);
}

/* At each close(2), which waits for it, where release comes some time later. */
static void volume_flush(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file) {
    (void)ino;
    struct handle *handle = handle_of(file);
    if (handle->creates)
        set_created(handle->node, now_ns());
    fuse_reply_err(request, handle->writes && fails(EIO_CLOSE, handle->node->path) ? EIO : 0);
}

static void volume_release(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file) {
    (void)ino;
    struct handle *handle = handle_of(file);
    close(handle->fd);
    pthread_mutex_destroy(&handle->lock);
    free(handle);
    fuse_reply_err(request, 0);
}

/* ---- Folders ---- */

static void volume_opendir(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file) {
    const struct node *folder = node_of(ino);
    int fd = folder->is_gone ? -1 : openat(root, at(folder), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    file->fh = (uintptr_t)stream;
    stream ? fuse_reply_open(request, file) : fuse_reply_err(request, folder->is_gone ? ENOENT : errno);
}

/* A listing is paid for at its first part. */
static void volume_readdir(fuse_req_t request, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *file) {
    const struct node *folder = node_of(ino);
    DIR *stream = (DIR *)(uintptr_t)file->fh;
    if (!offset) {
        count(LISTINGS, 1);
        sleep_us(atomic_load(&settings[LIST_US]));
        if (fails(EIO_LIST, folder->path)) {
            fuse_reply_err(request, EIO);
            return;
        }
        rewinddir(stream);
    } else {
        seekdir(stream, offset);
    }
    char *part = malloc(size);
    if (!part)
        abort();
    size_t used = 0;
    for (struct dirent *found; (found = readdir(stream));) {
        if (!is_listed(folder, found->d_name))
            continue;
        struct stat attr = {.st_ino = found->d_ino, .st_mode = DTTOIF(found->d_type)};
        size_t needs = fuse_add_direntry(request, part + used, size - used, found->d_name, &attr, found->d_off);
        if (needs > size - used)
            break;
        used += needs;
    }
    fuse_reply_buf(request, part, used);
    free(part);
}

static void volume_releasedir(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file) {
    (void)ino;
    closedir((DIR *)(uintptr_t)file->fh);
    fuse_reply_err(request, 0);
}

static void volume_mkdir(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode) {
    char *path = join(parent, name);
    struct fuse_entry_param entry;
    int error = mkdirat(root, path, mode) ? errno : fill_entry(path, &entry);
    if (!error)
        set_created(node_of(entry.ino), now_ns());
    error ? fuse_reply_err(request, error) : fuse_reply_entry(request, &entry);
    free(path);
}

static void delete(fuse_req_t request, fuse_ino_t parent, const char *name, int flags) {
    char *path = join(parent, name);
    count(DELETES, 1);
    int error = fails(EIO_DELETE, path) ? EIO : unlinkat(root, path, flags) ? errno : 0;
    if (!error)
        detach(path);
    fuse_reply_err(request, error);
    free(path);
}

static void volume_unlink(fuse_req_t request, fuse_ino_t parent, const char *name) {
    delete(request, parent, name, 0);
}

static void volume_rmdir(fuse_req_t request, fuse_ino_t parent, const char *name) {
    delete(request, parent, name, AT_REMOVEDIR);
}

/* Symbolic links cannot be made here, but the backing folder may hold some. */
static void volume_readlink(fuse_req_t request, fuse_ino_t ino) {
    char target[PATH_MAX];
    ssize_t length = readlinkat(root, node_of(ino)->path, target, sizeof target - 1);
    if (length < 0) {
        fuse_reply_err(request, errno);
        return;
    }
    target[length] = 0;
    fuse_reply_readlink(request, target);
}

static void volume_statfs(fuse_req_t request, fuse_ino_t ino) {
    (void)ino;
    struct statvfs room;
    if (fstatvfs(root, &room)) {
        fuse_reply_err(request, errno);
        return;
    }
    pthread_mutex_lock(&node_lock);
    long long capacity = atomic_load(&settings[CAPACITY_BYTES]), free_bytes = atomic_load(&settings[FREE_BYTES]);
    if (capacity > 0 && free_bytes < 0)
        free_bytes = capacity > stored_total ? capacity - stored_total : 0;
    pthread_mutex_unlock(&node_lock);
    if (free_bytes >= 0) { /* in blocks of one byte, to be exact */
        room.f_blocks = capacity > 0 ? (fsblkcnt_t)capacity : room.f_blocks * room.f_frsize;
        room.f_bsize = room.f_frsize = 1;
        room.f_bfree = room.f_bavail = (fsblkcnt_t)free_bytes;
    }
    fuse_reply_statfs(request, &room);
}

/* ---- Serving ---- */

static atomic_bool is_answered; /* the first request, in which the kernel and libfuse agree on what is to come */

static void volume_init(void *data, struct fuse_conn_info *connection) {
    (void)data;
    /* splicing takes a pipe per thread, of which an ordinary user may have few */
    connection->want &= ~(unsigned)(FUSE_CAP_SPLICE_READ | FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE);
    connection->max_background = 1024; /* reads ahead, for all files together; the kernel's own limit is 12 */
    connection->congestion_threshold = 1024;
    connection->max_write = 256 << 10; /* each thread keeps a buffer of this size */
}

/* Without FUSE_PARALLEL_DIROPS the kernel asks for one new name of a folder at a time. (Creations always come one by
   one.) libfuse before 3.17 takes the wish and does not tell the kernel (libfuse/libfuse#861), so that the answer
   to the first request is amended on its way. */
static ssize_t send_reply(int fd, struct iovec *parts, int count, void *data) {
    (void)data;
    if (!atomic_load(&is_answered) && count > 1 && parts[1].iov_len >= offsetof(struct fuse_init_out, max_background)) {
        ((struct fuse_init_out *)parts[1].iov_base)->flags |= FUSE_PARALLEL_DIROPS;
        atomic_store(&is_answered, true);
    }
    return writev(fd, parts, count);
}

static ssize_t receive_request(int fd, void *bytes, size_t size, void *data) {
    (void)data;
    ssize_t got = read(fd, bytes, size);
    if (got < 0 && errno == EBADF) /* closed by the unmount, which is no error */
        errno = ENODEV;
    return got;
}

/* What is absent is refused with ENOSYS: rename, link, symlink, mknod. So are attributes, which the kernel turns into
   EOPNOTSUPP, and fsync, which it takes for done. Locks are absent so that the kernel keeps them, and readdirplus so
   that scandir followed by a stat of each file costs those stats. Newer kernels make EPERM of the ENOSYS of link. */
static const struct fuse_lowlevel_ops operations = {
    .init = volume_init,
    .lookup = volume_lookup,
    .getattr = volume_getattr,
    .setattr = volume_setattr,
    .readlink = volume_readlink,
    .open = volume_open,
    .create = volume_create,
    .read = volume_read,
    .write = volume_write,
    .flush = volume_flush,
    .release = volume_release,
    .opendir = volume_opendir,
    .readdir = volume_readdir,
    .releasedir = volume_releasedir,
    .mkdir = volume_mkdir,
    .unlink = volume_unlink,
    .rmdir = volume_rmdir,
    .statfs = volume_statfs,
};

static void serve_one(struct fuse_session *session, struct fuse_buf *buffer) {
    int got = fuse_session_receive_buf(session, buffer);
    if (got > 0)
        fuse_session_process_buf(session, buffer);
    else if (got < 0 && got != -EINTR && got != -EAGAIN && got != -ENOENT)
        fuse_session_exit(session);
}

static void *serve(void *session) {
    struct fuse_buf buffer = {.mem = NULL};
    while (!fuse_session_exited(session))
        serve_one(session, &buffer);
    return NULL;
}

/* ---- Commands ---- */

static int index_of(const char *name, const char *const *names, int length) {
    for (int i = 0; i < length; i++)
        if (!strcmp(names[i], name))
            return i;
    return -1;
}

static size_t from_hex(const char *hex, char *bytes, size_t room) {
    size_t length = 0;
    for (unsigned byte; length < room && sscanf(hex + 2 * length, "%2x", &byte) == 1; length++)
        bytes[length] = (char)byte;
    return length;
}

static const char *add_fault(const char *kind, long long times, long long bytes_per_s, long long latency_us,
                             const char *match) {
    int known = index_of(kind, fault_names, FAULT_KINDS), i = atomic_load(&fault_count);
    if (known < 0)
        return "no such fault";
    if (i == sizeof faults / sizeof *faults)
        return "too many faults";
    pthread_mutex_lock(&fault_lock);
    struct fault *fault = &faults[i];
    *fault = (struct fault){
        .kind = (enum fault_kind)known, .times = times, .bytes_per_s = bytes_per_s, .latency_us = latency_us};
    fault->match_length = from_hex(match, fault->match, sizeof fault->match);
    atomic_store(&fault_count, i + 1);
    pthread_mutex_unlock(&fault_lock);
    return NULL;
}

static void print_opens(void) {
    pthread_mutex_lock(&node_lock);
    printf("ok");
    for (struct node *node = all_nodes; node; node = node->next_of_all) {
        if (!node->reader_opens)
            continue;
        printf(" %lld:", node->reader_opens);
        for (const char *byte = node->path; *byte; byte++)
            printf("%02x", (unsigned char)*byte);
    }
    printf("\n");
    pthread_mutex_unlock(&node_lock);
}

static void obey(const char *line) {
    char name[32], match[2 * PATH_MAX] = "";
    long long value, bytes_per_s, latency_us;
    const char *error = NULL;
    if (sscanf(line, "set %31s %lld", name, &value) == 2) {
        int known = index_of(name, setting_names, SETTINGS);
        if (known < 0)
            error = "no such setting";
        else
            atomic_store(&settings[known], value);
    } else if (sscanf(line, "fault %31s %lld %lld %lld %8190s", name, &value, &bytes_per_s, &latency_us, match) >= 4) {
        error = add_fault(name, value, bytes_per_s, latency_us, match);
    } else if (!strcmp(line, "clear\n")) {
        atomic_store(&fault_count, 0);
    } else if (!strcmp(line, "opens\n")) {
        print_opens();
        return;
    } else if (!strcmp(line, "counts\n")) {
        printf("ok");
        for (int i = 0; i < COUNTERS; i++)
            printf(" %s=%lld", counter_names[i], atomic_load(&counters[i]));
        pthread_mutex_lock(&node_lock);
        printf(" stored=%lld\n", stored_total);
        pthread_mutex_unlock(&node_lock);
        return;
    } else {
        error = "no such command";
    }
    error ? printf("error %s\n", error) : printf("ok\n");
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: %s BACKING MOUNT_POINT OWNER_PID THREADS\n", argv[0]);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    umask(0); /* the kernel has applied the caller's */
    struct rlimit files;
    if (!getrlimit(RLIMIT_NOFILE, &files)) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    atomic_store(&settings[FREE_BYTES], -1);
    atomic_store(&settings[CACHE_MS], 1000);
    atomic_store(&settings[REFUSE_TIMES], 1);
    root = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) {
        perror(argv[1]);
        return 1;
    }

    char *options[] = {argv[0], "-o", "fsname=bridge-volume,subtype=volume"};
    struct fuse_args args = FUSE_ARGS_INIT(3, options);
    struct fuse_session *session = fuse_session_new(&args, &operations, sizeof operations, NULL);
    const struct fuse_custom_io io = {.read = receive_request, .writev = send_reply};
    if (!session || fuse_session_mount(session, argv[2]) ||
        fuse_session_custom_io(session, &io, fuse_session_fd(session)))
        return 1;
    struct fuse_buf buffer = {.mem = NULL};
    while (!atomic_load(&is_answered) && !fuse_session_exited(session))
        serve_one(session, &buffer);

    /* libfuse's own pool starts its threads under load, which would show in what is measured */
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    for (int i = 0; i < atoi(argv[4]); i++)
        if (pthread_create(&thread, &attributes, serve, session))
            return 1;
    printf("ok\n");

    /* a process forked from the owner may hold the other end of standard input, so that its end alone proves nothing */
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    char *line = NULL;
    size_t room = 0;
    do {
        fflush(stdout);
        if (poll(&input, 1, 500) <= 0)
            continue;
        if (getline(&line, &room, stdin) < 0)
            break;
        obey(line);
    } while (getppid() == (pid_t)atoi(argv[3]) && !fuse_session_exited(session));
    fuse_session_exit(session); /* replies that come too late are no errors */
    fuse_session_unmount(session);
    _exit(0); /* requests in mid-sleep end with it, as failures */
}
