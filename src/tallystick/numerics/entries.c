/* The sparse form of log entries (spec/rounding-log.md 3): quotients of the gaps in unary, remainders, symbols, all least
 * significant bit first.
 *
 * tally_read_entries is given bytes of another party: it reads inside [data, data + bytes) only, whatever they say, and
 * returns -1 for everything that is not the one encoding of that many entries. log.py says what is wrong with it.
 */

#include "native.h"

#define SURE_BITS 57 /* of a word taken at any bit, at least */

/* Return 64 bits from bit `at` on, those that are not there zero; the lowest SURE_BITS are right, what lies above may be cut. */
INLINE uint64_t word_at(const uint8_t *data, int64_t bytes, int64_t at) {
    int64_t byte = at >> 3, left = bytes - byte;
    uint64_t word = 0;
    if (left <= 0) return 0;
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    if (left >= 8) {
        memcpy(&word, data + byte, 8);
        return word >> (at & 7);
    }
#endif
    for (int64_t i = 0; i < smaller(left, 8); i++) word |= (uint64_t)data[byte + i] << (8 * i);
    return word >> (at & 7);
}

/* Add the lowest `width` bits of value (at most SURE_BITS, no other is set) at bit `at` of zeroed data. */
INLINE void put(uint8_t *data, int64_t at, uint64_t value, int width) {
    uint8_t *byte = data + (at >> 3);
    value <<= at & 7;
    for (int64_t bits = (at & 7) + width; bits > 0; bits -= 8, value >>= 8) *byte++ |= (uint8_t)value;
}

/* Write `count` > 0 entries at ascending positions to data; return the bits they take: quotients, and width + k for each.
 *
 * `bytes` hold at least count * (1 + k + width) + ((index[count - 1] + 1 - count) >> k) bits. k + width is at most 48 + 32. */
EXPORT int64_t tally_write_entries(const int64_t *index, const int64_t *symbols, int64_t count, int32_t k, int32_t width,
                                   uint8_t *data, int64_t bytes) {
    int64_t at = 0, previous = -1;
    memset(data, 0, (size_t)bytes);
    for (int64_t i = 0; i < count; i++) {
        at += (index[i] - previous - 1) >> k;
        data[at >> 3] |= (uint8_t)(1u << (at & 7));
        at++;
        previous = index[i];
    }
    previous = -1;
    for (int64_t i = 0; i < count && k; i++, at += k) {
        put(data, at, (uint64_t)(index[i] - previous - 1) & (((uint64_t)1 << k) - 1), k);
        previous = index[i];
    }
    for (int64_t i = 0; i < count; i++, at += width) put(data, at, (uint64_t)symbols[i], width);
    return at;
}

/* Read `count` > 0 entries of a site of n elements (n <= 2^48, count <= n, k <= 48, width <= 32) into index and symbols.
 * Return the bits they take, or -1. */
EXPORT int64_t tally_read_entries(const uint8_t *data, int64_t bytes, int64_t n, int64_t count, int32_t k, int32_t width,
                                  int64_t *index, int64_t *symbols) {
    int64_t at = 0, longest = count + ((n - count) >> k), previous = -1;
    if (bytes > INT64_MAX / 8 || count > 8 * bytes / (1 + k + width)) return -1;
    for (int64_t i = 0; i < count; i++) {
        int64_t begin = at;
        uint64_t word;
        while (!(word = word_at(data, bytes, at) & (((uint64_t)1 << SURE_BITS) - 1))) {
            at += SURE_BITS;
            if (at >= longest || at >= 8 * bytes) return -1;
        }
        at += __builtin_ctzll(word);
        index[i] = at++ - begin;
        if (at > longest) return -1;
    }
    if (at + count * (k + width) > 8 * bytes) return -1;
    for (int64_t i = 0; i < count; i++, at += k) {
        uint64_t rest = word_at(data, bytes, at) & (((uint64_t)1 << k) - 1);
        previous += 1 + (int64_t)(((uint64_t)index[i] << k) | rest);
        if (previous >= n) return -1;
        index[i] = previous;
    }
    for (int64_t i = 0; i < count; i++, at += width)
        symbols[i] = (int64_t)(word_at(data, bytes, at) & (((uint64_t)1 << width) - 1));
    return at;
}
