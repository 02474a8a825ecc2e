// SPDX-License-Identifier: Apache-2.0
package rmq.bench;

import java.io.IOException;
import java.nio.MappedByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.Arrays;

/** A file of keys, one a line. */
final class Keys {
    private final MappedByteBuffer bytes;
    private int[] starts = new int[1 << 20]; // of line i; one more than there are lines
    private int count;

    Keys(Path path) throws IOException {
        try (FileChannel channel = FileChannel.open(path)) {
            bytes = channel.map(FileChannel.MapMode.READ_ONLY, 0, channel.size());
        }
        for (int i = 0; i < bytes.limit(); i++) {
            if (bytes.get(i) == '\n') {
                if (++count == starts.length) {
                    starts = Arrays.copyOf(starts, 2 * count);
                }
                starts[count] = i + 1;
            }
        }
    }

    /** New strings, whose hash is not known yet. */
    String[] strings(int first, int size) {
        String[] made = new String[size];
        byte[] line = new byte[0];
        for (int i = 0; i < size; i++) {
            int start = starts[first + i];
            int length = starts[first + i + 1] - 1 - start;
            if (length > line.length) {
                line = new byte[2 * length];
            }
            bytes.get(start, line, 0, length);
            made[i] = new String(line, 0, length, StandardCharsets.UTF_8);
        }
        return made;
    }
}
