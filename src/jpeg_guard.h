/* Guard calls into libjpeg-turbo that may fail: its error_exit must not return (the default one exits the process), so it jumps to
 * where the guard was set. The frames in between are the library's and ours, never Cython's.
 */
#ifndef SHMLOAD_JPEG_GUARD_H
#define SHMLOAD_JPEG_GUARD_H

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "libjpeg62.h"

enum { JPEG_MOST_SCANS = 500 }; /* a progressive file needs about 10; libjpeg-turbo's own tools use this limit against bombs */

enum {
    JPEG_LENIENT, /* no warning is an error: the library invents pixels for damaged or missing data */
    JPEG_WHOLE,   /* warnings are errors unless they leave every pixel intact */
    JPEG_STRICT,  /* every warning is an error */
};

typedef struct {
    jpeg62_error err;
    jpeg62_progress progress;
    jmp_buf failed;
    int strictness;      /* JPEG_LENIENT, JPEG_WHOLE or JPEG_STRICT: which of the library's warnings are errors */
    int num_passed_over; /* warnings so far that were not errors */
    char *message; /* JPEG62_MESSAGE bytes: cause of the failure */
} jpeg_guard;

static jpeg_guard *jpeg_guard_of(jpeg62_common *cinfo) {
    return (jpeg_guard *)cinfo->client_data;
}

_Noreturn static void jpeg_fail(jpeg62_common *cinfo) {
    jpeg_guard *guard = jpeg_guard_of(cinfo);
    cinfo->err->format_message(cinfo, guard->message);
    longjmp(guard->failed, 1);
}

_Noreturn static void jpeg_refuse(jpeg_guard *guard, const char *why) {
    snprintf(guard->message, JPEG62_MESSAGE, "%s", why);
    longjmp(guard->failed, 1);
}

/* Return whether a warning of libjpeg-turbo means that the file breaks a rule but every pixel is intact. Compares the text,
 * because the numbers of messages differ between versions. Bytes before a restart marker (D0 to D7) are inside a scan, where the
 * usual cause is damaged data. */
static int jpeg_is_remark(const char *text) {
    static const char junk[] = "extraneous bytes before marker 0x";
    const char *at = strstr(text, junk);
    if (at != NULL) {
        unsigned long marker = strtoul(at + sizeof(junk) - 1, NULL, 16);
        return marker < 0xD0 || marker > 0xD7;
    }
    return strstr(text, "unknown JFIF revision number") || strstr(text, "Unknown Adobe color transform code") ||
           strstr(text, "Invalid SOS parameters for sequential JPEG");
}

static void jpeg_warn(jpeg62_common *cinfo, int level) {
    jpeg_guard *guard = jpeg_guard_of(cinfo);
    char text[JPEG62_MESSAGE];
    if (level >= 0)
        return;
    cinfo->err->num_warnings++;
    cinfo->err->format_message(cinfo, text);
    if (guard->strictness == JPEG_STRICT || (guard->strictness == JPEG_WHOLE && !jpeg_is_remark(text)))
        jpeg_fail(cinfo);
    guard->num_passed_over++;
}

static void jpeg_say_nothing(jpeg62_common *cinfo) {
}

static void jpeg_count_scans(jpeg62_common *cinfo) {
    if (cinfo->is_decompressor && ((jpeg62_decompress *)cinfo)->input_scan_number > JPEG_MOST_SCANS)
        jpeg_refuse(jpeg_guard_of(cinfo), "a JPEG of more than 500 scans");
}

/* Set the guard, before any other call with a decompressor or compressor; both keep it when they are created. */
static void jpeg_set_guard(const jpeg62_library *library, jpeg_guard *guard, jpeg62_common *cinfo) {
    cinfo->err = library->std_error(&guard->err);
    cinfo->client_data = guard;
    guard->err.error_exit = jpeg_fail;
    guard->err.emit_message = jpeg_warn;
    guard->err.output_message = jpeg_say_nothing;
    guard->progress.progress_monitor = jpeg_count_scans;
}

#endif
