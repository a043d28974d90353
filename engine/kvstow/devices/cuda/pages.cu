// Moves the pages of many blocks between a KV cache and a staging buffer, where each block's pages lie back to back.

struct Piece {                 // a part of one region's page; the same part of every block is `stride` bytes further
    unsigned long long page;   // address of the part in block 0
    long long stride;
    unsigned long long offset; // of the part within a block's staged bytes
    unsigned long long bytes;
};

// One thread block copies `bytes` in words of type T; both addresses have the same remainder modulo sizeof(T).
template <typename T>
__device__ void copy_words(unsigned char* target, const unsigned char* source, unsigned long long bytes)
{
    unsigned long long head = (0 - reinterpret_cast<unsigned long long>(target)) & (sizeof(T) - 1);
    head = head < bytes ? head : bytes;
    const unsigned long long words = (bytes - head) / sizeof(T);
    T* to = reinterpret_cast<T*>(target + head);
    const T* from = reinterpret_cast<const T*>(source + head);
    unsigned long long i = threadIdx.x;
    const unsigned long long step = blockDim.x;
    for (; i + 3 * step < words; i += 4 * step) { // four loads in flight: one alone leaves the memory idle
        const T a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
        to[i] = a, to[i + step] = b, to[i + 2 * step] = c, to[i + 3 * step] = d;
    }
    for (; i < words; i += step)
        to[i] = from[i];
    for (i = threadIdx.x; i < head; i += step)
        target[i] = source[i];
    for (i = head + words * sizeof(T) + threadIdx.x; i < bytes; i += step)
        target[i] = source[i];
}

__device__ void copy_bytes(unsigned char* target, const unsigned char* source, unsigned long long bytes)
{
    const unsigned long long difference =
        reinterpret_cast<unsigned long long>(target) ^ reinterpret_cast<unsigned long long>(source);
    if ((difference & 15) == 0)
        copy_words<uint4>(target, source, bytes);
    else if ((difference & 3) == 0)
        copy_words<unsigned int>(target, source, bytes);
    else
        copy_words<unsigned char>(target, source, bytes);
}

// As a kernel's argument the list needs no memory of its own; read from host memory it slowed the copies beside it by 3 %.
struct Blocks {
    int ids[1000];
};

// grid: (pieces, blocks). The bytes of block `blocks.ids[y]` lie at `staging + y * block_bytes`.
extern "C" __global__ void gather(
    const Piece* pieces, unsigned char* staging, unsigned long long block_bytes, const __grid_constant__ Blocks blocks)
{
    const Piece piece = pieces[blockIdx.x];
    copy_bytes(staging + blockIdx.y * block_bytes + piece.offset,
        reinterpret_cast<const unsigned char*>(piece.page + blocks.ids[blockIdx.y] * piece.stride), piece.bytes);
}

extern "C" __global__ void scatter(
    const Piece* pieces, unsigned char* staging, unsigned long long block_bytes, const __grid_constant__ Blocks blocks)
{
    const Piece piece = pieces[blockIdx.x];
    copy_bytes(reinterpret_cast<unsigned char*>(piece.page + blocks.ids[blockIdx.y] * piece.stride),
        staging + blockIdx.y * block_bytes + piece.offset, piece.bytes);
}

struct Place {                     // where a block's bytes come from and go to
    unsigned long long slot;       // address, in host memory
    unsigned long long block;      // number
};

// One warp copies `bytes`, as `copy_words` does, with up to eight loads of a thread under way: a load over the link takes 2 us.
template <typename T>
__device__ void fetch_words(unsigned char* target, const unsigned char* source, unsigned int bytes, unsigned int lane)
{
    unsigned int head = (0 - reinterpret_cast<unsigned long long>(target)) & (sizeof(T) - 1);
    head = head < bytes ? head : bytes;
    const unsigned int words = (bytes - head) / sizeof(T);
    T* to = reinterpret_cast<T*>(target + head);
    const T* from = reinterpret_cast<const T*>(source + head);
    for (unsigned int start = lane; start < words; start += 256) {
        T values[8];
#pragma unroll
        for (int k = 0; k < 8; ++k)
            if (start + 32 * k < words)
                values[k] = __ldcs(from + start + 32 * k);
#pragma unroll
        for (int k = 0; k < 8; ++k)
            if (start + 32 * k < words)
                to[start + 32 * k] = values[k];
    }
    for (unsigned int i = lane; i < head; i += 32)
        target[i] = source[i];
    for (unsigned int i = head + words * sizeof(T) + lane; i < bytes; i += 32)
        target[i] = source[i];
}

// Reads pieces of slots over the link straight into pages: piece `p` of `places[b]` lies at `pieces[p].offset` in the slot.
// Each warp takes one piece after the other, so that a few thread blocks keep the link busy whatever the size of a page.
extern "C" __global__ void fetch(const Piece* pieces, const Place* places, unsigned int num_pieces, unsigned int num_places)
{
    const unsigned int lane = threadIdx.x % 32;
    const unsigned long long warps = gridDim.x * (blockDim.x / 32), items = 1ULL * num_pieces * num_places;
    for (unsigned long long i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; i < items; i += warps) {
        const Piece piece = pieces[i % num_pieces];
        const Place place = places[i / num_pieces];
        unsigned char* target = reinterpret_cast<unsigned char*>(piece.page + place.block * piece.stride);
        const unsigned char* source = reinterpret_cast<const unsigned char*>(place.slot + piece.offset);
        const unsigned int bytes = static_cast<unsigned int>(piece.bytes);
        const unsigned long long difference =
            reinterpret_cast<unsigned long long>(target) ^ reinterpret_cast<unsigned long long>(source);
        if ((difference & 15) == 0)
            fetch_words<uint4>(target, source, bytes, lane);
        else if ((difference & 3) == 0)
            fetch_words<unsigned int>(target, source, bytes, lane);
        else
            fetch_words<unsigned char>(target, source, bytes, lane);
    }
}
