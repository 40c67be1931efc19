/* An NVTX tool that writes what it is called with: `+name` and `-name` for ranges of a thread (with its number),
 * `(name id` and `) id` for ranges of a process, one line each, to $NVTX_NAMES.<process id>.
 *
 * NVTX loads the library named by NVTX_INJECTION64_PATH at its first use, calls InitializeInjectionNvtx2 with a
 * function that returns tables, and from then on whatever is written into the table of callbacks. Declared here is
 * what the Python package uses: ranges of a domain, with registered strings. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

struct attributes { /* version 2 of the event attributes */
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    union { uint64_t number; double real; } payload;
    int32_t message_type;
    union { const char *ascii; const void *registered; } message;
};
struct callbacks {
    size_t size;
    int (*table_of)(int module, void ****table, unsigned *size);
};
typedef const void *(*export_table_fn)(uint32_t id);

enum { CALLBACKS = 1, CORE2 = 5, ASCII = 1, REGISTERED = 3, DEPTH = 64 };
enum { START = 2, END = 3, PUSH = 4, POP = 5, REGISTER = 10, CREATE = 12 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t ranges;
static __thread const char *open_[DEPTH];
static __thread int depth;

static void say(const char *sign, const char *name, uint64_t number) {
    char path[4096];
    snprintf(path, sizeof path, "%s.%d", getenv("NVTX_NAMES"), getpid());
    pthread_mutex_lock(&lock);
    FILE *file = fopen(path, "a");
    if (file) {
        fprintf(file, "%s%s %llu\n", sign, name, (unsigned long long)number);
        fclose(file);
    }
    pthread_mutex_unlock(&lock);
}

static const char *name_of(const struct attributes *event) {
    return event->message_type == REGISTERED || event->message_type == ASCII ? event->message.ascii : "?";
}
static uint64_t thread(void) { return (uint64_t)syscall(SYS_gettid); }

static void *create(const char *name) { return strdup(name); }
static void *register_string(void *domain, const char *text) { (void)domain; return strdup(text); }
static int push(void *domain, const struct attributes *event) {
    (void)domain;
    if (depth < DEPTH) open_[depth] = name_of(event);
    say("+", name_of(event), thread());
    return depth++;
}
static int pop(void *domain) {
    (void)domain;
    if (depth) depth--;
    say("-", depth < DEPTH && open_[depth] ? open_[depth] : "?", thread());
    return depth;
}
static uint64_t start(void *domain, const struct attributes *event) {
    (void)domain;
    uint64_t number = __sync_add_and_fetch(&ranges, 1);
    say("(", name_of(event), number);
    return number;
}
static void end(void *domain, uint64_t number) { (void)domain; say(")", "", number); }

int InitializeInjectionNvtx2(export_table_fn export_table) {
    const struct callbacks *found = export_table(CALLBACKS);
    void ***table = NULL;
    unsigned size = 0;
    if (!getenv("NVTX_NAMES") || !found || !found->table_of(CORE2, &table, &size) || size <= CREATE) return 0;
    *table[CREATE] = (void *)create;
    *table[REGISTER] = (void *)register_string;
    *table[PUSH] = (void *)push;
    *table[POP] = (void *)pop;
    *table[START] = (void *)start;
    *table[END] = (void *)end;
    return 1;
}
