/* The heads of frames, of calls and of replies, as engine/wire/frames.py and engine/wire/messages.py lay them out. */
#ifndef WEFT_HEADS_H
#define WEFT_HEADS_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

enum { FRAME_HEADER_BYTES = 16 };

typedef struct {
    double remaining_s;
    long long creation;
    uint64_t context_id, message_id;
    uint16_t name_bytes, span_bytes;
    uint32_t code_bytes, reference_count, payload_bytes;
} call_head;
_Static_assert(sizeof(call_head) == 48, "a compiler has put gaps into the head of a CALL");

typedef struct {
    uint64_t context_id, message_id;
    uint32_t reference_count, payload_bytes;
} reply_head;
_Static_assert(sizeof(reply_head) == 24, "a compiler has put gaps into the head of a REPLY");

static const size_t PAYLOAD_LIMIT_BYTES = (size_t)31 << 26;

#endif
