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
