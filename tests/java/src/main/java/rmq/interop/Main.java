// SPDX-License-Identifier: Apache-2.0
package rmq.interop;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import com.alibaba.fastjson.serializer.SerializerFeature;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/**
 * Does jobs until standard input ends. A line is the path of a job, the reply is the path of its answer.
 *
 * <p>A job: {@code options} (bean properties of MessageStoreConfig), {@code put} (see {@link Messages}),
 * {@code questions} (see {@link Answers}), {@code leave_open} (do not close the store at the end; the next job of the
 * same store goes on with it).
 * An answer: {@code loaded}, {@code put}, {@code answers}; or {@code error}.
 */
public final class Main {
    private static final long DISPATCH_TIMEOUT_NS = TimeUnit.SECONDS.toNanos(60);

    private static final Map<String, DefaultMessageStore> LEFT_OPEN = new HashMap<>();

    private Main() {
    }

    public static void main(String[] args) throws IOException {
        PrintStream replies = System.out;
        System.setOut(System.err); // RocketMQ's loggers may print
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JSONObject answer = new JSONObject(true);
            try {
                work(JSON.parseObject(Files.readString(Path.of(line))), answer);
            } catch (Exception | LinkageError error) {
                error.printStackTrace();
                answer.put("error", error.toString());
            }
            Path file = Path.of(line + ".answer");
            Files.writeString(file, JSON.toJSONString(answer, SerializerFeature.DisableCircularReferenceDetect));
            replies.println(file);
            replies.flush();
        }
        System.exit(0); // threads of stores that were left open
    }

    private static void work(JSONObject job, JSONObject answer) throws Exception {
        MessageStoreConfig config = job.getObject("options", MessageStoreConfig.class);
        String root = config.getStorePathRootDir();
        DefaultMessageStore left = LEFT_OPEN.remove(root);
        DefaultMessageStore store = left == null ? Release.newStore(config) : left;
        boolean loaded = left != null || store.load();
        answer.put("loaded", loaded);
        try {
            if (loaded) {
                if (left == null) {
                    store.start();
                }
                answer.put("put", put(store, job.getJSONArray("put")));
                awaitDispatch(store);
                answer.put("answers", new Answers(store).to(job.getJSONObject("questions")));
            }
        } finally {
            if (job.getBooleanValue("leave_open")) {
                LEFT_OPEN.put(root, store);
            } else {
                store.shutdown();
            }
        }
    }

    private static JSONArray put(DefaultMessageStore store, JSONArray items) throws IOException {
        JSONArray results = new JSONArray();
        for (int i = 0; i < items.size(); i++) {
            JSONObject item = items.getJSONObject(i);
            results.add(Messages.result(item.containsKey("batch")
                ? store.putMessages(Messages.batch(item))
                : store.putMessage(Messages.single(item))));
        }
        return results;
    }

    private static void awaitDispatch(DefaultMessageStore store) throws InterruptedException {
        long end = System.nanoTime() + DISPATCH_TIMEOUT_NS;
        while (store.dispatchBehindBytes() > 0) {
            if (System.nanoTime() > end) {
                throw new IllegalStateException(store.dispatchBehindBytes() + " bytes are not dispatched");
            }
            Thread.sleep(1);
        }
    }
}
