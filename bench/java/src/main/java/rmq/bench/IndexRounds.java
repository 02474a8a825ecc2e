// SPDX-License-Identifier: Apache-2.0
package rmq.bench;

import com.alibaba.fastjson.JSONObject;
import java.io.IOException;
import java.lang.reflect.Field;
import java.nio.MappedByteBuffer;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.store.index.IndexFile;

/** Rounds of IndexFile#putKey and IndexFile#selectPhyOffset. Key number i has phy offset i, store timestamp time + i. */
final class IndexRounds {
    private static final int ZEROS = 1 << 20;

    private final Map<String, IndexFile> files = new HashMap<>();
    private final Map<String, Keys> keys = new HashMap<>();

    /** {@code first}, {@code count}: of the keys. Answers how many fitted. */
    void put(JSONObject job, JSONObject answer) throws IOException {
        IndexFile file = file(job);
        int first = job.getIntValue("first");
        String[] strings = strings(job);
        long begin = Main.now();
        int fitted = put(file, strings, first, job.getLongValue("time") + first);
        answer.put("nanos", Main.now() - begin);
        answer.put("fitted", fitted);
    }

    private static int put(IndexFile file, String[] strings, long phyOffset, long time) {
        int fitted = 0;
        for (int i = 0; i < strings.length; i++) {
            fitted += file.putKey(strings[i], phyOffset + i, time + i) ? 1 : 0;
        }
        return fitted;
    }

    /** Answers how many phy offsets were found, and their sum. */
    void select(JSONObject job, JSONObject answer) throws IOException {
        IndexFile file = file(job);
        String[] strings = strings(job);
        long[] result = new long[2];
        long begin = Main.now();
        select(file, strings, job.getIntValue("max_num"), result);
        answer.put("nanos", Main.now() - begin);
        answer.put("found", result[0]);
        answer.put("sum", result[1]);
    }

    private static void select(IndexFile file, String[] strings, int maxNum, long[] result) {
        List<Long> found = new ArrayList<>(maxNum);
        for (String key : strings) {
            found.clear();
            file.selectPhyOffset(found, key, maxNum, 0, Long.MAX_VALUE);
            result[0] += found.size();
            for (int i = 0; i < found.size(); i++) {
                result[1] += found.get(i);
            }
        }
    }

    /** All zeros again, as a new file is; its pages stay mapped. */
    void empty(JSONObject job) throws IOException, ReflectiveOperationException {
        IndexFile file = file(job);
        Field field = IndexFile.class.getDeclaredField("mappedByteBuffer");
        field.setAccessible(true);
        MappedByteBuffer bytes = (MappedByteBuffer) field.get(file);
        byte[] zeros = new byte[ZEROS];
        for (int at = 0; at < bytes.capacity(); at += ZEROS) {
            bytes.put(at, zeros, 0, Math.min(ZEROS, bytes.capacity() - at));
        }
        file.load(); // the header's fields anew
    }

    void close(JSONObject job) {
        IndexFile file = files.remove(job.getString("file"));
        if (file != null) {
            file.shutdown();
        }
    }

    private IndexFile file(JSONObject job) throws IOException {
        String path = job.getString("file");
        IndexFile file = files.get(path);
        if (file == null) {
            file = new IndexFile(path, job.getIntValue("slots"), job.getIntValue("entries"), 0, 0);
            file.load();
            files.put(path, file);
        }
        return file;
    }

    private String[] strings(JSONObject job) throws IOException {
        String path = job.getString("keys");
        if (!keys.containsKey(path)) {
            keys.put(path, new Keys(Path.of(path)));
        }
        return keys.get(path).strings(job.getIntValue("first"), job.getIntValue("count"));
    }
}
