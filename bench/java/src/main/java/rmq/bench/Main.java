// SPDX-License-Identifier: Apache-2.0
package rmq.bench;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.nio.charset.StandardCharsets;

/**
 * RocketMQ's classes, one timed round for each line of standard input.
 *
 * <p>A line is a JSON object whose {@code do} names the work, the reply is a line too: {@code nanos}, the CPU time of
 * the thread that did it, and what it found; or {@code error}. Making strings, messages and files is not timed.
 */
public final class Main {
    private static final ThreadMXBean THREADS = ManagementFactory.getThreadMXBean();

    private Main() {
    }

    /** CPU time of this thread in ns. */
    static long now() {
        return THREADS.getCurrentThreadCpuTime();
    }

    public static void main(String[] args) throws IOException {
        PrintStream replies = System.out;
        System.setOut(System.err); // RocketMQ's loggers may print
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        IndexRounds index = new IndexRounds();
        LogRounds log = new LogRounds();
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JSONObject answer = new JSONObject(true);
            try {
                JSONObject job = JSON.parseObject(line);
                switch (job.getString("do")) {
                    case "put" -> index.put(job, answer);
                    case "empty" -> index.empty(job);
                    case "select" -> index.select(job, answer);
                    case "close" -> index.close(job);
                    case "messages" -> log.messages(job);
                    case "append" -> log.append(job, answer);
                    case "forget" -> log.forget(job);
                    case "scan" -> log.scan(job, answer);
                    case "unmap" -> log.unmap(job);
                    case "dispatch" -> log.dispatch(job, answer);
                    default -> throw new IllegalArgumentException(line);
                }
            } catch (Exception | LinkageError error) {
                error.printStackTrace();
                answer.put("error", error.toString());
            }
            replies.println(JSON.toJSONString(answer));
            replies.flush();
        }
        System.exit(0); // threads of RocketMQ
    }
}
